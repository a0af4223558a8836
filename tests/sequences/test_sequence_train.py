"""Training with and without labels: what is held out stays out, runs go on to the same bits, mistakes are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from brim.config import read
from brim.errors import BrimError, CheckpointError, ConfigError, DatasetError, ShardCorrupt
from brim.sequences import Corpus, SequenceTraining, embed, evaluate, load_run, make_sequences, pack, train

torch.set_num_threads(1)  # small batches: a second thread only competes

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


def unlabelled(folder: Path, out: Path) -> Path:
    flat = out / "flat"
    flat.mkdir(parents=True)
    for file in folder.rglob("*.npy"):
        (flat / file.name).symlink_to(file)
    pack(flat, out / "corpus")
    return out / "corpus"


# Learning


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


def test_the_report_counts_all_phases(runs):
    report, _ = runs["self"]

    assert [phase.phase for phase in report.phases] == ["encoder-1", "classifier-1", "encoder-2", "classifier-2"]
    seconds = sum(phase.seconds for phase in report.phases)
    assert report.samples_per_s == pytest.approx(sum(phase.samples for phase in report.phases) / seconds)
    assert all(phase.samples == 2 * 48 for phase in report.phases)
    assert report.peak_bytes == max(phase.peak_bytes for phase in report.phases)
    supervised, run = runs["supervised"]
    parts = json.loads((run / "run.json").read_text())["split"]
    assert supervised.phases[0].val_loss > 0  # the validation part is looked at
    assert supervised.phases[0].samples == 3 * parts["train"] == 3 * (48 - parts["validation"]) < 3 * 48
    shares = sum(phase.busy_share * phase.seconds for phase in report.phases) / seconds
    assert report.busy_share == pytest.approx(shares)


def test_labels_change_nothing_in_training_without_them(folder, tmp_path):
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.npy"))
    true = [file.split("/")[0] for file in files]
    for name, labels in (("one", true), ("two", [f"class_{index * 7 % 3}" for index in range(60)])):
        parts = ["train" if index % 4 else "test" for index in range(60)]
        lines = map(",".join, zip(files, labels, parts, strict=True))
        (tmp_path / "labels.csv").write_text("\n".join(["file,label,split", *lines]))
        pack(folder, tmp_path / f"corpus-{name}", labels=tmp_path / "labels.csv")
        train(tmp_path / f"corpus-{name}", tmp_path / name, replace(SELF, iterations=1), device="cpu")

    assert weights(tmp_path / "one") == weights(tmp_path / "two")


def test_the_classifier_trains_the_encoder_only_if_it_may(corpus, tmp_path):
    config = replace(SELF, iterations=1, encoder_epochs=1)
    encoders = {}
    for tune, epochs in ((False, 1), (False, 2), (True, 2)):
        out = tmp_path / f"{tune}-{epochs}"
        train(corpus, out, replace(config, fine_tune=tune, classifier_epochs=epochs), device="cpu")
        encoders[tune, epochs] = load_file(out / "network.safetensors")["encoder.embed.weight"]

    assert torch.equal(encoders[False, 1], encoders[False, 2])
    assert not torch.equal(encoders[False, 2], encoders[True, 2])


def test_a_folder_that_is_not_packed_trains_through_the_loader(folder, runs, tmp_path, caplog):
    caplog.set_level("INFO", "brim")

    report = train(folder, tmp_path / "run", replace(SUPERVISED, num_workers=0), device="cpu")

    assert report.tier == "loader"
    assert f"{folder} is not packed: it is read file by file; training on a packed corpus is faster" in caplog.messages
    assert held_out(tmp_path / "run") == held_out(runs["supervised"][1])


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


def test_a_run_goes_on_with_its_own_encoder_alone_wherever_that_is(runs, corpus, tmp_path):
    config = replace(SUPERVISED, encoder=str(runs["self"][1]))
    train(corpus, tmp_path / "whole", config, device="cpu")
    shutil.copytree(runs["self"][1], tmp_path / "moved")

    train(corpus, tmp_path / "run", config, device="cpu", stop=stop_at_once)
    refused(CheckpointError, "begun with another encoder", corpus, tmp_path / "run", SUPERVISED, resume=True)
    train(corpus, tmp_path / "run", replace(config, encoder=str(tmp_path / "moved")), device="cpu", resume=True)

    assert weights(tmp_path / "run") == weights(tmp_path / "whole") != weights(runs["supervised"][1])


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


# Stopped, killed, resumed


@pytest.mark.parametrize("config", [SELF, replace(SUPERVISED, members=2)], ids=["self", "members"])
def test_a_stopped_run_ends_with_the_same_bits(runs, corpus, tmp_path, config):
    whole = runs["self"][1]
    if config.members > 1:
        whole = tmp_path / "whole"
        train(corpus, whole, config, device="cpu")
    asked = iter(range(1, 1000))

    stopped = train(corpus, tmp_path / "run", config, device="cpu", stop=lambda: next(asked) >= 11)
    report = train(corpus, tmp_path / "run", config, device="cpu", resume=True)

    assert (stopped.stopped, stopped.scores, report.stopped) == (True, None, False)
    assert weights(tmp_path / "run") == weights(whole)


def test_a_run_goes_on_where_its_corpus_has_moved_in_another_tier_and_from_an_older_version(corpus, runs, tmp_path):
    calls = iter([False, True])
    train(corpus, tmp_path / "run", SUPERVISED, device="cpu", stop=lambda: next(calls))
    shutil.copytree(corpus, tmp_path / "elsewhere")
    file = tmp_path / "run/run.json"
    about = json.loads(file.read_text())
    about["training"]["model"] = TINY  # an older version wrote only what differs from the default network
    file.write_text(json.dumps(about))

    config = replace(SUPERVISED, tier="window", num_workers=1)
    train(tmp_path / "elsewhere", tmp_path / "run", config, device="cpu", resume=True)

    assert weights(tmp_path / "run") == weights(runs["supervised"][1])


# Refused


def refused(kind: type[BrimError], match: str, *args: Any, **options: Any) -> None:
    with pytest.raises(kind, match=match):
        train(*args, device="cpu", **options)


def test_a_run_goes_on_only_as_it_began(runs, corpus, folder, tmp_path):
    _, out = runs["supervised"]
    before = sorted(out.rglob("*"))

    refused(CheckpointError, "add resume", corpus, out, SUPERVISED)
    for change, words in (
        ({"classifier_epochs": 4}, "classifier_epochs was 3 and is 4"),
        ({"seed": 1}, "seed was 0 and is 1"),
    ):
        refused(CheckpointError, words, corpus, out, replace(SUPERVISED, **change), resume=True)
    refused(CheckpointError, "another corpus", unlabelled(folder, tmp_path), out, SELF, resume=True)

    assert sorted(out.rglob("*")) == before


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


def test_frames_that_are_too_large_are_refused_in_a_folder_too(tmp_path):
    make_sequences(tmp_path / "npy", 20, dim=4, classes=2, mean_length=6)
    np.save(tmp_path / "npy/class_1/000001.npy", np.full((5, 4), 1e300))

    refused(DatasetError, "000001.npy", tmp_path / "npy", tmp_path / "run", replace(SELF, num_workers=0))

    assert not (tmp_path / "run").exists()


CONFLICTS = [
    ({"augmentation": None}, "augmentation"),
    ({"objective": {"contrast": 0, "reconstruction": 0}}, "objective.contrast"),
    ({"members": 2}, "members"), ({"batch_size": 1}, "batch_size"), ({"encoder": "run"}, "encoder"),
    ({"variants": 2}, "variants"), ({"folds": 3}, "folds"), ({"method": "ensemble"}, "method"),
    ({"mode": "supervised", "variants": 2, "max_frames": 9}, "variants"),
    ({"mode": "supervised", "variants": 2, "augmentation": None}, "variants"),
    ({"mode": "supervised", "seeds": 2}, "seeds"),
    ({"mode": "supervised", "folds": "leave-one-group-out"}, "folds"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "field"), CONFLICTS)
def test_settings_that_exclude_each_other_are_refused_by_name(values, field):
    with pytest.raises(ConfigError) as caught:
        read(SequenceTraining, values)

    assert (caught.value.field, caught.value.code) == (f"config.{field}", "conflict")
