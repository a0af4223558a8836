from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from brim.sequences import Corpus, SequenceConfig, make_sequences, pack
from brim.sequences.ablation import run as ablation
from brim.sequences.ablation.loop import (
    AblationData,
    LoopSetup,
    PackedLstm,
    endless,
    make_source,
)
from brim.sequences.ablation.plot import plot
from brim.sequences.ablation.report import Ablation, AblationStep, judge
from brim.sequences.ablation.run import START, ablate
from brim.sequences.corpus import SequenceFolder
from brim.sequences.model import BiLstm

torch.set_num_threads(1)
CPU = torch.device("cpu")
MODEL = SequenceConfig(dim=5, channels=8, kernel=3, hidden=4, attention=4, embedding=4)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablate")
    make_sequences(folder / "in", 80, 5, 3, mean_length=10)
    pack(folder / "in", folder / "corpus", dtype="float32")
    return folder / "corpus"


# The whole


def test_the_table_and_the_plot_show_what_made_no_difference(tmp_path):
    first = AblationStep(
        name=START, samples_per_s=82.0, busy_share=0.3, ceiling_share=0.4, peak_bytes=10**9, verdict="start"
    )
    said = {"batch 64": "faster", "workers": "no difference", "prefetch": "slower"}
    rows = [replace(first, name=name, verdict=verdict, change=1.0) for name, verdict in said.items()]
    nothing = dict.fromkeys(("samples_per_s", "busy_share", "ceiling_share", "peak_bytes"))
    unfit = replace(first, name="resident", verdict="did not fit", **nothing)
    found = Ablation(steps=(first, *rows, unfit), device="a device", notes=("a note",))
    lines = found.table().splitlines()
    assert lines[3].split()[0] == "workers"
    assert lines[3].endswith("no difference")
    assert lines[5].endswith("did not fit")
    assert lines[-1] == "· a note"
    plot(tmp_path / "deep" / "plot.png", found)
    assert (tmp_path / "deep" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["plot.png"]


def test_what_does_not_fit_stays_switched_off(corpus, monkeypatch):
    plan = [(START, {}, ""), ("batch 64", {"batch_size": 64}, ""), ("set_to_none", {"set_to_none": True}, "")]
    monkeypatch.setattr(ablation, "_plan", lambda device: iter(plan))

    def source(setup, *rest):
        assert setup.batch_size == 16 or not setup.set_to_none
        if setup.batch_size == 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_source(setup, *rest)

    monkeypatch.setattr(ablation, "make_source", source)
    found = ablate(corpus, steps=2, device="cpu", model=MODEL, cap_s=0.1)
    assert [step.verdict for step in found.steps[:2]] == ["start", "did not fit"]
    assert found.steps[1].samples_per_s is None
    assert found.steps[2].samples_per_s > 0


# Parts


def test_packed_sequences_give_what_the_padded_lstm_gives():
    torch.manual_seed(0)
    lstm = BiLstm(3, 4, 2)
    x, length = torch.randn(4, 9, 3), torch.tensor([9, 1, 5, 7])
    packed = PackedLstm(lstm)
    torch.testing.assert_close(packed(x, length), lstm(x, length), atol=1e-5, rtol=0)
    packed.host_length = length
    torch.testing.assert_close(packed(x, length), lstm(x, length), atol=1e-5, rtol=0)


@pytest.mark.parametrize("change", [{}, {"packed": True}, {"packed": True, "buckets": True},
                                    {"packed": True, "buckets": True, "resident": True}])  # fmt: skip
def test_every_feed_gives_every_item_once_and_counts_its_frames(corpus, change):
    opened = Corpus.open(corpus)
    rows = torch.arange(0, 80, 2)
    folder = corpus.parent / "some"
    folder.mkdir(exist_ok=True)
    if not any(folder.iterdir()):
        for number, row in enumerate(rows.tolist()):
            np.save(folder / f"{number:03d}.npy", opened.sequence(row).numpy())
    data = AblationData(files=SequenceFolder(folder), corpus=opened, rows=rows, labels=opened.labels, num_classes=3)
    setup = LoopSetup(device_augmentation=True, **change)
    source = make_source(setup, data, CPU, 0)
    with source:
        batches = endless(source, opened.lengths if change else data.files.lengths)
        fed = [next(batches) for _ in range(source.num_batches)]
        batches.close()
    items = torch.cat([one.batch["item"] for one in fed])
    wanted = rows if change else torch.arange(40)
    assert sorted(items.tolist()) == wanted.tolist()
    labels = torch.cat([one.batch["label"] for one in fed])
    assert torch.equal(labels, opened.labels[items if change else rows[items]])
    assert sum(one.num_frames for one in fed) == int(opened.lengths[rows].sum())
    assert all(one.num_frames == int(one.batch["length"].sum()) for one in fed)
    assert all(one.num_padded == one.batch["frames"][..., 0].numel() for one in fed)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([100, 101, 99, 100, 100], [150, 151, 149, 150, 150], "faster"),
        ([100, 101, 99, 100, 100], [80, 81, 79, 80, 80], "slower"),
        ([100, 101, 99, 100, 100], [101, 101, 101, 101, 101], "no difference"),
        ([100, 160, 60, 120, 80], [110, 170, 70, 120, 90], "no difference"),
        ([100, 101, 99, 100, 100], [101, 100, 99, 100, 400], "no difference"),  # medians
        ([100, 60], [110], "no difference"),
    ],
)
def test_a_difference_has_to_be_greater_than_the_noise(before, after, verdict):
    assert judge(before, after) == verdict


def test_the_optimisations_are_switched_on_one_after_another():
    setup = LoopSetup()
    for _, change, _ in ablation._plan(CPU):
        setup = replace(setup, **change)

    assert [name for name, *_ in ablation._plan(CPU)][::4] == [
        START,
        "persistent, pinned, non-blocking",
        "packed corpus",
        "compile/graphs",
    ]
    on = dict.fromkeys(("packed", "device_augmentation", "buckets", "resident", "compiled", "set_to_none"), True)
    assert setup == replace(setup, batch_size=64, persistent=True, autotuner=True, **on)


def test_a_step_is_judged_by_sequences_per_second_against_the_one_before_that_fitted():
    lengths = torch.tensor([10, 30, 1000])
    data = SimpleNamespace(corpus=SimpleNamespace(lengths=lengths), rows=torch.tensor([0, 1]))
    bench = ablation._Bench(data=data, model=MODEL, device=CPU, seed=0, steps=1, cap_s=1.0, progress=None, drift=0.05)
    loops = [
        rates and ablation._Measurement([float(rate) for rate in rates], 0.9, 0.5, 7, "")
        for rates in ([200, 400, 100], None, [400, 400, 400, 400], [410, 410, 410, 410])
    ]

    steps = list(bench._judged([(name, {}, "") for name in "abcd"], loops))

    assert [step.samples_per_s for step in steps] == [10, None, 20, 20.5]  # medians of frames over 20 frames each
    assert [step.change for step in steps] == [None, None, 2, pytest.approx(1.025)]
    assert [step.verdict for step in steps] == ["start", "did not fit", "no difference", "no difference"]
    bench.drift = 0.0
    assert list(bench._judged([("c", {}, ""), ("d", {}, "")], loops[2:]))[1].verdict == "faster"
