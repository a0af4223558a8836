"""Weights load strictly, from safetensors or a checkpoint that runs no code."""

import pickle

import pytest
import torch
from torch import nn

from brim.errors import CheckpointError
from brim.segmentation.networks import find_weights, load_weights, read_metadata, save_weights


def module(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))


def same(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_what_is_saved_loads_with_its_metadata(tmp_path):
    file, other = tmp_path / "w.safetensors", module(1)
    save_weights(module(0), file, {"model": "x", "size": "64"})

    load_weights(other, file)

    assert same(other, module(0))
    assert read_metadata(file) == {"model": "x", "size": "64"}
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"model": state},
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},  # of DataParallel
    ],
)
def test_a_torch_checkpoint_loads(tmp_path, wrap):
    torch.save(wrap(module(0).state_dict()), tmp_path / "w.pt")
    other = module(1)

    load_weights(other, tmp_path / "w.pt")

    assert same(other, module(0))
    assert read_metadata(tmp_path / "w.pt") == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("2.bias"), "2.bias is missing"),
        (lambda s: s.update(extra=torch.zeros(1)), "extra is unexpected"),
        (lambda s: s.update({"2.bias": torch.zeros(2)}), r"2.bias is \[2\], expected \[1\]"),
        (lambda s: s["2.bias"].fill_(float("nan")), "2.bias holds NaN or Inf"),
    ],
)
def test_a_tensor_that_does_not_match_is_named_and_nothing_is_loaded(tmp_path, change, message):
    state, other = module(0).state_dict(), module(1)
    change(state)
    torch.save(state, tmp_path / "w.pt")

    with pytest.raises(CheckpointError, match=message):
        load_weights(other, tmp_path / "w.pt")

    if "NaN" not in message:
        assert same(other, module(1))


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("evil.pt", pickle.dumps(Evil())),
        ("text.pt", b"not weights"),
        ("empty.safetensors", b""),
        ("cut.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00{}"),
        ("list.pt", None),
    ],
)
def test_files_that_are_no_weights_are_refused_and_run_no_code(tmp_path, name, content, capsys):
    if content is None:
        torch.save([1, 2], tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)

    with pytest.raises(CheckpointError, match=name):
        load_weights(module(), tmp_path / name)

    assert "code ran" not in capsys.readouterr().out


def test_a_run_means_its_weights(tmp_path):
    for name in ("last", "best"):
        (tmp_path / "train" / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"holds none of weights\.safetensors"):
        find_weights(tmp_path)
    for name in ("last", "best"):
        (tmp_path / "train" / name / "model.safetensors").touch()
        assert find_weights(tmp_path).parent.name == name
    (tmp_path / "weights.safetensors").touch()
    assert find_weights(tmp_path) == tmp_path / "weights.safetensors"
    with pytest.raises(CheckpointError, match="do not exist"):
        find_weights(tmp_path / "nothing")
