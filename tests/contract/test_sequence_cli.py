"""Packing, training and scoring sequences as others build on them: JSON, exit codes, what a refused command leaves."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_commands import answer, brim, refused, without_times
from safetensors.torch import load_file

from brim.cli import main
from brim.sequences.ablation.run import Ablation, AblationStep
from brim.sequences.corpus.synthetic import make_sequences

torch.set_num_threads(1)  # small batches: a second thread only competes

SPENT = ["wall_s", "startup_s", "work_s", "overhead"]
TRAIN_KEYS = [
    "run", "mode", "samples_per_s", "padding_share", "tier", "ceiling_share", "busy_share", "scores", "peak_bytes",
    "model", "ceiling_spread", "comparison", "warnings", *SPENT,
]  # fmt: skip
EVALUATE_KEYS = ["items", "accuracy", "ari", "nmi", "matched_accuracy"]
EVALUATE_KEYS += ["uar", "macro_f1", "per_class", "confusion", "classes", "ccc", "rmse", "r2"]
ABLATE_KEYS = ["name", "samples_per_s", "busy_share", "ceiling_share", "peak_bytes"]
SHORT = ["--classifier-epochs", "1", "--encoder-epochs", "1", "--iterations", "1", "--device", "cpu"]
EVERY = [*SHORT, "--batch-size", "16", "--tier", "ram", "--precision", "fp32", "--num-workers", "2",
         "--prefetch-factor", "3", "--seed", "4", "--members", "2"]  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small network, which is not the command's business, and a short look at the ceiling."""
    from brim.engine.training import trainer
    from brim.sequences.config import EncoderShape, SequenceConfig

    slow = trainer.time_step
    monkeypatch.setattr(trainer, "time_step", lambda *a, **k: slow(*a, **{**k, "budget_s": 0.01}))
    small = {"channels": 16, "hidden": 8, "attention": 8, "embedding": 16}
    for name, value in small.items():
        monkeypatch.setitem(EncoderShape.__init__.__kwdefaults__, name, value)
        monkeypatch.setitem(SequenceConfig.__init__.__kwdefaults__, name, value)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sequences and its corpus."""
    path = tmp_path_factory.mktemp("made")
    make_sequences(path / "npy", 40, dim=6, classes=2, mean_length=10)
    assert main(["sequence", "pack", str(path / "npy"), "--out", str(path / "corpus")]) == 0
    return path


# What works


def test_pack_says_what_it_packed(made, tmp_path):
    found = answer("sequence", "pack", made / "npy", "--out", tmp_path / "corpus", "--dtype", "float32")

    assert found["complete"]
    assert (found["items"], found["dim"], found["dtype"], found["labelled"]) == (40, 6, "float32", 40)
    assert found["classes"] == ["class_0", "class_1"]


def test_train_evaluate_and_embed_supervised(made, tmp_path):
    run = tmp_path / "run"

    trained = answer("sequence", "train", made / "corpus", "--out", run, "--mode", "supervised", *EVERY)
    scored = answer("sequence", "evaluate", run, made / "corpus", "--device", "cpu")
    files = ("--out", tmp_path / "e.safetensors", "--plot", tmp_path / "e.png")
    embedded = answer("sequence", "embed", run, made / "corpus", *files)

    assert list(trained) == TRAIN_KEYS
    assert (trained["run"], trained["mode"], trained["tier"]) == (str(run), "supervised", "ram")
    assert list(trained["scores"]) == ["accuracy", "uar", "macro_f1"]
    assert trained["samples_per_s"] > 0
    assert trained["peak_bytes"] > 0
    assert list(scored) == [*EVALUATE_KEYS, *SPENT]
    assert {name: scored[name] for name in ("accuracy", "uar", "macro_f1")} == trained["scores"]
    assert scored["ari"] is scored["nmi"] is scored["matched_accuracy"] is None
    assert sum(map(sum, scored["confusion"])) == scored["items"] == 8
    assert embedded["items"] == len(load_file(tmp_path / "e.safetensors")["embedding"]) == 40
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "run.json").read_text())["training"]["seed"] == 4


def test_folds_are_supervised_and_end_with_a_table(made, tmp_path):
    argv = ["sequence", "train", made / "corpus", "--out", tmp_path / "run", "--folds", "2", "--model", "rocket"]

    trained = answer(*argv)

    result = trained["cross_validation"]
    assert (trained["mode"], result["folds"], result["seeds"]) == ("supervised", ["1", "2"], [0])
    assert set(result["scores"]["uar"]) == {"mean", "std", "low", "high", "values"}
    assert (tmp_path / "run" / "table.tex").is_file()
    assert "set --groups to a column" in refused(*argv[:5], "--folds", "leave-one-group-out")
    assert "is a cross-validation" in refused("sequence", "evaluate", tmp_path / "run", made / "corpus")


def test_self_mode_is_the_default_and_scores_clusters(made, tmp_path):
    trained = answer("sequence", "train", made / "corpus", "--out", tmp_path / "run", *SHORT)
    scored = answer("sequence", "evaluate", tmp_path / "run", made / "corpus")

    assert list(trained) == TRAIN_KEYS
    assert trained["mode"] == "self"
    assert set(trained["scores"]) == {"ari", "nmi", "matched_accuracy", "probe_accuracy"}
    assert scored["accuracy"] is None
    assert scored["matched_accuracy"] == trained["scores"]["matched_accuracy"]


def test_supervised_training_starts_from_the_encoder_of_a_run(made, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    argv = ["sequence", "train", made / "corpus", "--mode", "supervised", "--encoder", first, "--out", second, *SHORT]

    assert f"{first} is not a directory" in refused(*argv)
    answer("sequence", "train", made / "corpus", "--out", first, *SHORT)
    trained = answer(*argv)

    assert list(trained["scores"]) == ["accuracy", "uar", "macro_f1"]
    assert json.loads((second / "run.json").read_text())["encoder"]["name"] == "first"
    assert answer(*argv, "--resume") | dict.fromkeys(SPENT) == trained | dict.fromkeys(SPENT)
    assert "is for supervised mode" in refused(
        "sequence", "train", made / "corpus", "--encoder", first, "--out", tmp_path / "third"
    )


def test_ablate_prints_the_steps(made, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    values = {"samples_per_s": 10.0, "busy_share": 0.5, "ceiling_share": 0.4, "peak_bytes": 7}
    steps = tuple(AblationStep(name=name, verdict="start", **values) for name in ("first configuration", "batch 64"))
    made_up = Ablation(steps=steps, device="cpu", notes=())
    asked = {}

    def measure(corpus: Path, **options: object) -> Ablation:
        asked.update(options, corpus=corpus)
        return made_up

    monkeypatch.setattr(sys.modules["brim.sequences.ablation.run"], "ablate", measure)

    found = answer("sequence", "ablate", made / "corpus", "--steps", "3", "--plot", tmp_path / "a.png")

    assert [list(step) for step in found["steps"]] == [ABLATE_KEYS, ABLATE_KEYS]
    assert (asked["steps"], asked["corpus"]) == (3, made / "corpus")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ablate_stopped_by_a_signal_leaves_no_unpacked_files(number, made, tmp_path, monkeypatch):
    def end(*_: object) -> None:
        assert list(tmp_path.glob("brim-ablate-*/*.npy"))
        os.kill(os.getpid(), number)
        pytest.fail("the signal was not heard")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("brim.sequences.ablation.run._Bench.run", end)

    assert main(["sequence", "ablate", str(made / "corpus"), "--device", "cpu"]) == 128 + number
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


# Bad input: exit 2, one line, nothing half-written


def test_a_folder_with_a_bad_file_is_refused_and_leaves_nothing_unless_it_may_be_skipped(tmp_path):
    make_sequences(tmp_path / "npy", 6, dim=6, classes=2, mean_length=6)
    np.save(tmp_path / "npy/class_0/x.npy", np.full((5, 6), np.nan, np.float32))

    packing = refused("sequence", "pack", tmp_path / "npy", "--out", tmp_path / "out/corpus")
    training = refused("sequence", "train", tmp_path / "npy", "--out", tmp_path / "run", "--clusters", "2")

    assert "class_0/x.npy frame 0 holds nan" in packing
    assert "class_0/x.npy: frame 0 holds NaN" in training
    assert sorted(file.name for file in tmp_path.iterdir()) == ["npy"]
    packed = brim("sequence", "pack", tmp_path / "npy", "--out", tmp_path / "corpus", "--skip-bad")
    assert "skipped: class_0/x.npy frame 0 holds nan" in packed.err
    assert "6 sequences" in packed.out


@pytest.mark.parametrize("part", ["shards/000000.safetensors", "items.json", "manifest.json"])
def test_a_corpus_altered_after_packing_is_refused_by_every_command(made, tmp_path, part):
    main(["sequence", "pack", str(made / "npy"), "--out", str(tmp_path / "corpus")])
    run = tmp_path / "run"
    main(["sequence", "train", str(tmp_path / "corpus"), "--out", str(run), "--mode", "supervised", *SHORT])
    file = tmp_path / "corpus" / part
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)

    corpus, new = tmp_path / "corpus", tmp_path / "new"
    for argv in (
        ["train", corpus, "--out", new],
        ["evaluate", run, corpus],
        ["embed", run, corpus, "--out", tmp_path / "e.safetensors"],
        ["ablate", corpus, "--steps", "1"],
    ):
        assert str(corpus) in refused("sequence", *argv)

    assert not new.exists()
    assert not (tmp_path / "e.safetensors").exists()


def test_what_is_not_there_is_refused(made, tmp_path):
    for argv in (
        ["pack", tmp_path / "no", "--out", tmp_path / "corpus"],
        ["train", tmp_path / "no", "--out", tmp_path / "run"],
        ["evaluate", tmp_path / "no", made / "corpus"],
        ["embed", tmp_path / "no", made / "corpus", "--out", tmp_path / "e.safetensors"],
        ["ablate", tmp_path / "no"],
    ):
        assert str(tmp_path / "no") in refused("sequence", *argv)

    assert not list(tmp_path.iterdir())


def test_supervised_mode_ignores_the_options_of_the_other(made, tmp_path):
    argv = ["sequence", "train", made / "corpus", "--out", tmp_path / "run", "--mode", "supervised"]
    first = answer(*argv, "--classifier-epochs", "1", "--encoder-epochs", "0", "--clusters", "99")

    again = answer(*argv, "--classifier-epochs", "1", "--iterations", "0", "--resume")
    assert without_times(again) == without_times(first)
