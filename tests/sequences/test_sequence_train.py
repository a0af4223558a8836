"""Training with and without labels: what is held out stays out, runs go on to the same bits, mistakes are refused."""

import csv
import json
import multiprocessing
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from brim.errors import BrimError, CheckpointError, ConfigError, DatasetError, ShardCorrupt
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus.packed import Corpus
from brim.sequences.corpus.packing import pack
from brim.sequences.corpus.splits import split, stratified
from brim.sequences.corpus.synthetic import make_sequences
from brim.sequences.evaluation.runs import load_run
from brim.sequences.evaluation.scoring import embed, evaluate
from brim.sequences.training.run import train
from waiting import PATIENCE_S, until

torch.set_num_threads(1)  # small batches: a second thread only competes

KEYS = {
    "run", "mode", "samples_per_s", "padding_share", "tier", "ceiling_share", "busy_share", "scores", "peak_bytes",
    "model", "comparison", "warnings", "ceiling_spread", "wall_s", "startup_s", "work_s", "overhead",
}  # fmt: skip
TINY = {"channels": 16, "hidden": 8, "attention": 8, "embedding": 16, "convolutions": 1}
SELF = SequenceTraining(
    iterations=2, encoder_epochs=2, classifier_epochs=2, batch_size=16, model=TINY, checkpoint_every_s=0.01
)
SUPERVISED = replace(SELF, mode="supervised", classifier_epochs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sequences(tmp_path_factory.mktemp("made") / "npy", 60, dim=8, classes=3, mean_length=12)


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Path:
    pack(folder, folder.parent / "corpus")
    return folder.parent / "corpus"


@pytest.fixture(scope="module")
def runs(corpus: Path) -> dict[str, Any]:
    """What undisturbed runs leave, by mode."""
    found = {}
    for config in (SELF, SUPERVISED):
        out = corpus.parent / f"run-{config.mode}"
        found[config.mode] = (train(corpus, out, config, device="cpu"), out)
    return found


@pytest.fixture(autouse=True)
def _short_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    from brim.engine.training import trainer

    slow = trainer.time_step
    monkeypatch.setattr(trainer, "time_step", lambda *a, **k: slow(*a, **{**k, "budget_s": 0.01}))


def with_labels(folder: Path, out: Path, row: Callable[[int, str], tuple[str, ...]]) -> Path:
    """A corpus of the folder with a CSV line for each file: label and split by index and name."""
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.npy"))
    out.mkdir(parents=True, exist_ok=True)
    with (out / "labels.csv").open("w", newline="") as opened:
        lines = csv.writer(opened)
        found = [row(index, name) for index, name in enumerate(files)]
        lines.writerow(("file", "label", "split")[: 1 + len(found[0])])
        lines.writerows((name, *values) for name, values in zip(files, found, strict=True))
    pack(folder, out / "corpus", labels=out / "labels.csv")
    return out / "corpus"


def unlabelled(folder: Path, out: Path) -> Path:
    flat = out / "flat"
    flat.mkdir(parents=True)
    for file in folder.rglob("*.npy"):
        (flat / file.name).symlink_to(file)
    pack(flat, out / "corpus")
    return out / "corpus"


# Learning


def test_supervised_training_learns_classes_it_was_not_shown(tmp_path):
    make_sequences(tmp_path / "npy", 150, dim=8, classes=3, mean_length=20)
    pack(tmp_path / "npy", tmp_path / "corpus")
    config = SequenceTraining(
        mode="supervised",
        classifier_epochs=15,
        batch_size=16,
        learning_rate=5e-3,
        model=TINY | {"channels": 32, "hidden": 16},
    )

    report = train(tmp_path / "corpus", tmp_path / "run", config, device="cpu")

    assert set(report.scores) == {"accuracy", "uar", "macro_f1"}
    assert report.scores["accuracy"] >= 0.9


def test_training_without_labels_finds_the_classes(tmp_path):
    make_sequences(tmp_path / "npy", 150, dim=8, classes=3, mean_length=20)
    pack(tmp_path / "npy", tmp_path / "corpus")
    config = SequenceTraining(
        iterations=1, encoder_epochs=12, classifier_epochs=8, batch_size=32, learning_rate=5e-3,
        model=TINY | {"channels": 32, "hidden": 16, "embedding": 32},
    )  # fmt: skip

    report = train(tmp_path / "corpus", tmp_path / "run", config, device="cpu")

    assert set(report.scores) == {"ari", "nmi", "matched_accuracy", "probe_accuracy"}
    assert report.scores["matched_accuracy"] >= 0.6  # chance is about 0.45 on 30 items
    assert report.scores["ari"] > 0.2
    assert report.scores["probe_accuracy"] >= 0.75


def test_the_report_has_the_keys_of_the_contract_and_counts_all_phases(runs, corpus):
    report, out = runs["self"]

    assert set(report.as_dict()) == KEYS
    assert report.as_dict()["run"] == str(out)
    assert [phase.phase for phase in report.phases] == ["encoder-1", "classifier-1", "encoder-2", "classifier-2"]
    seconds = sum(phase.seconds for phase in report.phases)
    assert report.samples_per_s == pytest.approx(sum(phase.samples for phase in report.phases) / seconds)
    assert all(phase.samples == 2 * 48 for phase in report.phases)
    assert 0 < report.padding_share < 1
    assert report.peak_bytes == max(phase.peak_bytes for phase in report.phases)


def test_labels_change_nothing_in_training_without_them(folder, tmp_path):
    def part(index: int) -> str:
        return "test" if index % 4 == 0 else "train"

    true = with_labels(folder, tmp_path / "true", lambda index, name: (name.split("/")[0], part(index)))
    wrong = with_labels(folder, tmp_path / "wrong", lambda index, name: (f"class_{index * 7 % 3}", part(index)))

    for name, corpus in (("one", true), ("two", wrong)):
        train(corpus, tmp_path / name, replace(SELF, iterations=1), device="cpu")

    one, two = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_corpus_without_labels_trains_and_has_no_scores(folder, tmp_path):
    report = train(unlabelled(folder, tmp_path), tmp_path / "run", replace(SELF, iterations=1), device="cpu")

    assert report.scores is None
    assert json.loads((tmp_path / "run/run.json").read_text())["outputs"] == 10


def test_a_folder_that_is_not_packed_trains_through_the_loader(folder, corpus, tmp_path, caplog):
    caplog.set_level("INFO", "brim")
    config = replace(SUPERVISED, num_workers=0)

    report = train(folder, tmp_path / "run", config, device="cpu")

    assert report.tier == "loader"
    assert [record.getMessage() for record in caplog.records if "packed" in record.getMessage()] == [
        f"{folder} is not packed: it is read file by file; training on a packed corpus is faster"
    ]
    assert held_out(tmp_path / "run") == held_out(train_quickly(corpus, tmp_path / "packed", config))


def train_quickly(corpus: Path, out: Path, config: SequenceTraining) -> Path:
    train(corpus, out, replace(config, classifier_epochs=1), device="cpu")
    return out


def test_variants_made_before_training_are_used_in_turn(corpus, tmp_path):
    config = replace(SUPERVISED, variants=2)

    report = train(corpus, tmp_path / "run", config, device="cpu")
    train(corpus, tmp_path / "again", config, device="cpu")

    assert report.phases[0].samples == 3 * 43
    one, two = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("run", "again"))
    assert one == two


@pytest.mark.parametrize("tier", ["vram", "ram", "window"])
def test_every_tier_trains_the_same_weights(corpus, runs, tmp_path, tier):
    report = train(corpus, tmp_path / "run", replace(SUPERVISED, tier=tier), device="cpu")

    assert report.tier == tier
    assert weights(tmp_path / "run") == weights(runs["supervised"][1])


# From the encoder of another run


def stop_at_once() -> bool:
    return True


def test_training_on_labels_starts_from_the_encoder_of_another_run(runs, corpus, tmp_path):
    _, unlabelled_run = runs["self"]
    config = replace(SUPERVISED, encoder=str(unlabelled_run), learning_rate=1e-12)

    train(corpus, tmp_path / "run", config, device="cpu")

    there, here = (load_file(run / "weights.safetensors") for run in (unlabelled_run, tmp_path / "run"))
    encoder = [name for name in there if name.startswith("encoder.")]
    assert {"encoder.shift", "encoder.scale"} < set(encoder)
    for name in encoder:
        torch.testing.assert_close(here[name], there[name], rtol=0, atol=1e-9)
    about = json.loads((tmp_path / "run/run.json").read_text())["encoder"]
    assert about["name"] == "run-self"


def test_a_run_from_an_encoder_goes_on_to_the_same_bits_even_if_that_moved(runs, corpus, tmp_path):
    config = replace(SUPERVISED, encoder=str(runs["self"][1]))
    train(corpus, tmp_path / "whole", config, device="cpu")
    shutil.copytree(runs["self"][1], tmp_path / "moved")

    train(corpus, tmp_path / "run", config, device="cpu", stop=stop_at_once)
    train(corpus, tmp_path / "run", replace(config, encoder=str(tmp_path / "moved")), device="cpu", resume=True)

    assert weights(tmp_path / "run") == weights(tmp_path / "whole") != weights(runs["supervised"][1])


def test_a_run_does_not_go_on_with_another_encoder(runs, corpus, tmp_path):
    train(corpus, tmp_path / "run", SUPERVISED, device="cpu", stop=stop_at_once)

    config = replace(SUPERVISED, encoder=str(runs["self"][1]))

    refused(CheckpointError, "begun with another encoder", corpus, tmp_path / "run", config, resume=True)


def test_an_encoder_that_does_not_fit_is_refused(runs, corpus, tmp_path):
    given, out = replace(SUPERVISED, encoder=str(runs["self"][1])), tmp_path / "run"
    make_sequences(tmp_path / "npy", 20, dim=5, classes=2, mean_length=6)
    pack(tmp_path / "npy", tmp_path / "corpus")

    refused(CheckpointError, "has dim=8, this training has dim=5", tmp_path / "corpus", out, given)
    wider = replace(given, model=TINY | {"channels": 24})
    refused(CheckpointError, "has channels=16, this training has channels=24", corpus, out, wider)
    refused(CheckpointError, "is not a directory", corpus, out, replace(given, encoder=str(tmp_path / "no")))
    refused(CheckpointError, "has no run.json", corpus, out, replace(given, encoder=str(corpus)))

    assert not out.exists()


def test_an_encoder_that_has_seen_what_is_held_out_is_refused(runs, corpus, tmp_path):
    config = replace(SUPERVISED, encoder=str(runs["self"][1]), seed=1)

    refused(CheckpointError, r"was trained on \d+ sequences that are held out here", corpus, tmp_path / "run", config)

    assert not (tmp_path / "run").exists()


# Several networks


def test_members_answer_together(corpus, tmp_path):
    config = replace(SUPERVISED, members=2, classifier_epochs=2)

    report = train(corpus, tmp_path / "run", config, device="cpu")
    found = evaluate(tmp_path / "run", corpus, device="cpu")
    embedded = embed(tmp_path / "run", corpus, tmp_path / "e.safetensors", device="cpu")

    assert [phase.phase for phase in report.phases] == ["supervised-1", "supervised-2"]
    assert found.accuracy == report.scores["accuracy"]
    assert embedded["embedding"] == 2 * TINY["embedding"]
    module = load_run(tmp_path / "run").module
    frames, length = torch.randn(3, 7, 8), torch.tensor([7, 2, 5])
    one, two = (member(frames, length).softmax(-1) for member in module.members)
    assert not torch.allclose(one, two)
    torch.testing.assert_close(module(frames, length).exp(), (one + two) / 2)


@pytest.mark.parametrize("batches", [4, 12])  # of 18, 9 for each member
def test_a_stopped_run_of_members_ends_with_the_same_bits(corpus, tmp_path, batches):
    config = replace(SUPERVISED, members=2)
    train(corpus, tmp_path / "whole", config, device="cpu")
    asked = iter(range(1, 100))

    stopped = train(corpus, tmp_path / "run", config, device="cpu", stop=lambda: next(asked) >= batches)
    train(corpus, tmp_path / "run", config, device="cpu", resume=True)

    assert stopped.stopped
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


# What is held out


def held_out(run: Path) -> set[str]:
    return set(json.loads((run / "run.json").read_text())["held_out"])


def weights(run: Path) -> bytes:
    return (run / "weights.safetensors").read_bytes()


def test_a_fifth_of_each_class_is_held_out_and_recorded(runs):
    _, run = runs["supervised"]

    held = held_out(run)

    assert [sum(name.startswith(f"class_{k}/") for name in held) for k in range(3)] == [4, 4, 4]
    assert not held & set(json.loads((run / "run.json").read_text())["validation"])


def test_the_split_of_the_corpus_comes_first(folder, tmp_path):
    def row(index: int, name: str) -> tuple[str, str]:
        return name.split("/")[0], "test" if index % 6 == 0 else "train"

    corpus = with_labels(folder, tmp_path, row)

    train(corpus, tmp_path / "run", replace(SUPERVISED, classifier_epochs=1), device="cpu")

    opened = Corpus.open(corpus)
    assert held_out(tmp_path / "run") == {
        name for name, part in zip(opened.ids, opened.split, strict=True) if part == "test"
    }


def test_statistics_and_clusters_know_only_training_items(runs, corpus):
    _, run = runs["self"]
    opened = Corpus.open(corpus)
    rows = [row for row, name in enumerate(opened.ids) if name not in held_out(run)]
    frames = np.concatenate([opened.sequence(row).numpy().astype(np.float64) for row in rows])

    statistics, pseudo = load_file(run / "statistics.safetensors"), load_file(run / "pseudo-1.safetensors")

    np.testing.assert_allclose(statistics["mean"], frames.mean(0), atol=1e-5)
    np.testing.assert_allclose(statistics["std"], frames.std(0), rtol=1e-5)
    assert pseudo["row"].tolist() == rows
    assert len(torch.unique(pseudo["label"])) == 3


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [((20, 20, 20), 0.2, [4, 4, 4]), ((10, 7, 3), 0.2, [2, 1, 1]), ((1, 1), 0.5, [0, 0]), ((3, 1), 0.01, [1, 0])],
)
def test_a_stratified_part_has_its_share_of_each_class_and_leaves_one(counts, share, expected):
    labels = torch.tensor([number for number, count in enumerate(counts) for _ in range(count)])

    found = stratified(labels, share, 0, "test")

    assert torch.bincount(labels[found], minlength=len(counts)).tolist() == expected
    assert torch.equal(found, stratified(labels, share, 0, "test"))


def test_the_seed_moves_the_split():
    labels = torch.arange(60) % 3

    one, two = (split(labels, [""] * 60, replace(SUPERVISED, seed=seed)) for seed in (0, 1))

    assert not torch.equal(one.held_out, two.held_out)
    assert len(torch.cat(one)) == 60
    assert len(torch.unique(torch.cat(one))) == 60


# Stopped, killed, resumed


@pytest.mark.parametrize("batches", [1, 11, 17])  # of 24, 6 in a phase
def test_a_stopped_run_ends_with_the_same_bits(runs, corpus, tmp_path, batches):
    _, undisturbed = runs["self"]
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked >= batches

    stopped = train(corpus, tmp_path / "run", SELF, device="cpu", stop=stop)
    report = train(corpus, tmp_path / "run", SELF, device="cpu", resume=True)

    assert stopped.stopped
    assert stopped.scores is None
    assert not report.stopped
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert report.scores == runs["self"][0].scores


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # an import of torch takes longer than the run
@pytest.mark.parametrize(
    ("mode", "sign"),
    [pytest.param("self", "encoder-1/last", marks=pytest.mark.long), ("self", "pseudo-1.safetensors"),
     pytest.param("self", "classifier-2/last", marks=pytest.mark.long), ("supervised", "supervised/last")],
)  # fmt: skip
def test_a_killed_run_ends_with_the_same_bits(runs, corpus, tmp_path, mode, sign):
    config = {"self": SELF, "supervised": SUPERVISED}[mode]
    out = tmp_path / "killed"
    held = {"device": "cpu", "stop": lambda: time.sleep(600 if (out / sign).exists() else 0)}
    child = multiprocessing.get_context("fork").Process(target=train, args=(corpus, out, config), kwargs=held)
    child.start()
    until(lambda: (out / sign).exists() or child.exitcode is not None)
    child.kill()
    child.join(PATIENCE_S)
    assert child.exitcode == -signal.SIGKILL
    assert not (out / "weights.safetensors").exists()

    train(corpus, out, config, device="cpu", resume=True)

    assert weights(out) == weights(runs[mode][1])


def test_a_run_whose_file_lists_only_what_differs_from_the_default_network_goes_on(corpus, tmp_path):
    report = train(corpus, tmp_path / "run", SUPERVISED, device="cpu")
    file = tmp_path / "run/run.json"
    about = json.loads(file.read_text())
    about["training"]["model"] = TINY
    file.write_text(json.dumps(about))

    assert train(corpus, tmp_path / "run", SUPERVISED, device="cpu", resume=True) == report


def test_a_finished_run_resumed_says_again_what_it_said(runs, corpus):
    report, out = runs["supervised"]

    assert train(corpus, out, SUPERVISED, device="cpu", resume=True) == report


def test_a_corpus_that_moved_is_still_the_same(corpus, runs, tmp_path):
    train(corpus, tmp_path / "run", SUPERVISED, device="cpu", stop=lambda: True)
    shutil.copytree(corpus, tmp_path / "elsewhere")

    train(tmp_path / "elsewhere", tmp_path / "run", SUPERVISED, device="cpu", resume=True)

    assert weights(tmp_path / "run") == weights(runs["supervised"][1])


def test_where_the_data_is_held_may_change_when_a_run_goes_on(corpus, runs, tmp_path):
    calls = iter([False, True])
    train(corpus, tmp_path / "run", SUPERVISED, device="cpu", stop=lambda: next(calls))

    train(corpus, tmp_path / "run", replace(SUPERVISED, tier="window", num_workers=1), device="cpu", resume=True)

    assert weights(tmp_path / "run") == weights(runs["supervised"][1])


# Refused


def refused(kind: type[BrimError], match: str, *args: Any, **options: Any) -> None:
    with pytest.raises(kind, match=match):
        train(*args, device="cpu", **options)


def test_a_run_goes_on_only_as_it_began(runs, corpus, folder, tmp_path):
    _, out = runs["supervised"]
    before = sorted(out.rglob("*"))

    refused(CheckpointError, "add resume", corpus, out, SUPERVISED)
    refused(CheckpointError, "classifier_epochs was 3 and is 4", corpus, out,
            replace(SUPERVISED, classifier_epochs=4), resume=True)  # fmt: skip
    refused(CheckpointError, "another corpus", unlabelled(folder, tmp_path), out, replace(SELF), resume=True)

    assert sorted(out.rglob("*")) == before


def test_a_folder_of_something_else_is_left_alone(corpus, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    refused(CheckpointError, "is not empty and has no run.json", corpus, tmp_path, SELF, resume=True)
    refused(CheckpointError, "is a file", corpus, tmp_path / "notes.txt", SELF)

    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_what_cannot_be_trained_is_refused_before_anything_is_written(folder, corpus, tmp_path):
    out = tmp_path / "run"
    plain = unlabelled(folder, tmp_path / "plain")

    refused(ConfigError, "has no labels, which supervised mode needs", plain, out, SUPERVISED)
    refused(ConfigError, "clusters=49 is more than the 48 sequences", corpus, out, replace(SELF, clusters=49))
    refused(DatasetError, "is not a directory", tmp_path / "nothing", out, SELF)
    refused(ConfigError, "max_frames=8 cannot hold the longest", corpus, out, replace(SELF, max_frames=8))
    refused(ConfigError, "needs a GPU", corpus, out, replace(SELF, precision="fp16"))

    assert not out.exists()


def test_a_corpus_altered_after_packing_is_refused(folder, tmp_path):
    pack(folder, tmp_path / "corpus")
    shard = next((tmp_path / "corpus/shards").iterdir())
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)

    refused(ShardCorrupt, "checksum", tmp_path / "corpus", tmp_path / "run", SELF)

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [np.float32(np.nan), 1e300])
def test_frames_that_are_not_finite_or_too_large_are_refused_in_a_folder_too(tmp_path, value):
    make_sequences(tmp_path / "npy", 20, dim=4, classes=2, mean_length=6)
    np.save(tmp_path / "npy/class_1/000001.npy", np.full((5, 4), value))

    refused(DatasetError, "000001.npy", tmp_path / "npy", tmp_path / "run", replace(SELF, num_workers=0))

    assert not (tmp_path / "run").exists()


def test_a_corpus_that_is_all_for_testing_has_nothing_to_train_on(folder, tmp_path):
    corpus = with_labels(folder, tmp_path, lambda index, name: (name.split("/")[0], "test"))

    refused(DatasetError, "none is left to train on", corpus, tmp_path / "run", SELF)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "half"}, {"tier": "disk"}, {"iterations": 0}, {"clusters": 1}, {"holdout": 1.0}, {"batch_size": 1},
        {"val_fraction": -0.1}, {"model": {"widht": 3}}, {"model": {"kernel": 4}}, {"learning_rate": 0.0},
        {"augmentation": None}, {"variants": 2}, {"num_workers": -1}, {"precision": "fp8"}, {"encoder": "run"},
        {"members": 2}, {"members": 0},
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(wrong):
    name = next(iter(wrong))

    with pytest.raises(ConfigError, match=next(iter(wrong["model"])) if name == "model" else name):
        SequenceTraining(**wrong)
