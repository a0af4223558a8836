import pickle

import numpy as np
import pytest
import torch

from brim.sequences.corpus.npy import FrameReader, NpyFile, read_header


def save(path, array, **options):
    np.save(path, array, **options)
    return path


def header_of(path):
    found = read_header(path, path.name)
    assert isinstance(found, NpyFile), found
    return found


def frames_of(path, dtype=torch.float32, first=0, stop=None):
    npy = header_of(path)
    out = torch.full(((stop or npy.length) - first, npy.dim), -1.0, dtype=dtype)
    return FrameReader(npy).read(first, out), out


def forge(path, header, body=b"", version=(1, 0)):
    text = header.encode()
    size = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    path.write_bytes(b"\x93NUMPY" + bytes(version) + size + text + body)
    return path


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4", "i1", ">i4", "<u8"])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_frames_of_every_number_type_and_order_are_read(tmp_path, dtype, order, stored):
    array = np.arange(21).reshape(7, 3).astype(dtype)
    path = save(tmp_path / "a.npy", np.asarray(array, order=order))
    fault, out = frames_of(path, stored)
    assert fault == ""
    assert torch.equal(out, torch.arange(21.0).reshape(7, 3).to(stored))
    fault, part = frames_of(path, stored, 2, 5)
    assert fault == ""
    assert torch.equal(part, out[2:5])


class _Trap:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


BAD = {
    "objects": (np.array([[{}, 1]], dtype=object), "Python objects"),
    "rank 1": (np.zeros(5, np.float32), "shape [5]"),
    "no features": (np.zeros((3, 0), np.float32), "at least one frame and one feature"),
    "complex": (np.zeros((2, 2), np.complex64), "complex64"),
    "records": (np.zeros((2, 2), [("x", "f4")]), "('x', '<f4')"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_header_that_cannot_be_packed_is_said(tmp_path, case):
    array, words = BAD[case]
    fault = read_header(save(tmp_path / "a.npy", array), "a.npy")
    assert isinstance(fault, str)
    assert words in fault


def test_objects_are_never_unpickled(tmp_path):
    path = save(tmp_path / "a.npy", np.array([[_Trap(), 1.0]], dtype=object))
    assert "Python objects" in read_header(path, "a.npy")
    path.write_bytes(pickle.dumps(_Trap()))
    assert "not an .npy" in read_header(path, "a.npy")


FORGED = {
    "huge": ("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1024), }", "truncated"),
    "negative": ("{'descr': '<f4', 'fortran_order': False, 'shape': (-4, -4), }", "at least one frame"),
    "code": ("__import__('os').system('true')", "not an .npy"),
    "nested": ("(" * 9000, "not an .npy"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_header_is_said_without_allocating(tmp_path, case):
    header, words = FORGED[case]
    fault = read_header(forge(tmp_path / "a.npy", header, b"1234"), "a.npy")
    assert isinstance(fault, str)
    assert words in fault


def test_versions_and_missing_files_are_said(tmp_path):
    assert "version 3.0" in read_header(forge(tmp_path / "a.npy", "{}", version=(3, 0)), "a.npy")
    assert "cannot be read" in read_header(tmp_path / "none.npy", "none.npy")
    (tmp_path / "empty.npy").touch()
    assert "not an .npy" in read_header(tmp_path / "empty.npy", "empty.npy")


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, ">f4"])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_the_first_frame_that_is_not_finite_is_named(tmp_path, value, dtype, stored):
    array = np.ones((900, 100), dtype)
    array[700, 99] = array[800, 0] = value
    path = save(tmp_path / "a.npy", array)
    fault, _ = frames_of(path, stored)
    assert fault.startswith(f"frame 700 holds {value:g}")
    assert frames_of(path, stored, 0, 700)[0] == ""
    assert frames_of(path, stored, 650, 900)[0] == fault
    assert FrameReader(header_of(path)).check(stored) == fault


@pytest.mark.parametrize("value", [65505.0, -65600.0, 1e30])
def test_what_float16_cannot_hold_suggests_float32(tmp_path, value):
    array = np.zeros((40, 3), np.float32)
    array[0, 0], array[33, 1] = 65504.0, value
    fault, _ = frames_of(save(tmp_path / "a.npy", array), torch.float16)
    assert fault.startswith("frame 33 holds")
    assert "dtype float32" in fault
    assert frames_of(tmp_path / "a.npy", torch.float32)[0] == ""


@pytest.mark.parametrize("value", [2049, -2049])
def test_integers_that_would_be_rounded_are_said(tmp_path, value):
    path = save(tmp_path / "a.npy", np.array([[2048], [-2048], [value]], np.int16))
    assert frames_of(path, torch.float16)[0].startswith(f"frame 2 holds {value}, float16 is exact up to 2048")
    assert frames_of(path, torch.float32)[0] == ""
    assert "frame 0" in frames_of(save(path, np.array([[2**63]], np.uint64)))[0]


def test_a_file_that_changed_after_its_header_was_read_is_noticed(tmp_path):
    path = save(tmp_path / "a.npy", np.ones((4, 2), np.float32))
    npy = header_of(path)
    with path.open("r+b") as opened:
        opened.truncate(140)
    assert "changed" in FrameReader(npy).read(0, torch.empty(4, 2))
    path.unlink()
    assert "cannot be read" in FrameReader(npy).read(0, torch.empty(4, 2))
