"""Shared memory between the API and a prediction process: slots, messages, the page, and how much of it is taken."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predicting import Predicting, until

from brim import errors
from brim.errors import BrimError, ConfigError, ImageError, NotFound, Overloaded
from brim.service.prediction.arena import KEPT_BYTES, Arena, Shared
from brim.service.prediction.protocol import Frames, StatusPage, error_of, failure, frame

# Slots


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 3000), st.none()), max_size=60), st.randoms(use_true_random=False))
def test_slots_never_overlap_keep_their_bytes_and_all_come_back(steps, rng):
    arena = Arena(Shared.make(16 * 1024), start=4096)
    held: dict[int, bytes] = {}
    for size in steps:
        if size is None:
            if held:
                offset = rng.choice(sorted(held))
                arena.free(offset)
                del held[offset]
            continue
        data = rng.randbytes(size)
        with suppress(Overloaded):
            held[arena.put(data)] = data
        for offset, expected in held.items():
            assert offset >= 4096
            assert bytes(arena.shared.view(offset, len(expected))) == expected
    for offset in held:
        arena.free(offset)
    assert arena.used_bytes == 0
    arena.put(b"x" * 12 * 1024)  # in one piece again
    arena.shared.close()


def test_what_can_never_fit_is_said_so():
    arena = Arena(Shared.make(4096))
    with pytest.raises(ConfigError, match="5000 bytes are more than the 4096"):
        arena.put(b"x" * 5000)
    with pytest.raises(ConfigError, match="outside"):
        arena.shared.view(4000, 1000)
    arena.shared.close()


def test_memory_goes_back_to_the_system_when_all_is_answered():
    arena = Arena(Shared.make(4 * KEPT_BYTES))
    offsets = [arena.put(b"x" * KEPT_BYTES) for _ in range(3)]
    taken = os.fstat(arena.shared.descriptor).st_blocks * 512
    for offset in offsets:
        arena.free(offset)

    assert taken >= 3 * KEPT_BYTES
    assert os.fstat(arena.shared.descriptor).st_blocks * 512 <= KEPT_BYTES
    arena.shared.close()


def test_nobody_can_cut_shared_memory_off_under_a_reader():
    made = Shared.make(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(made.descriptor, 0)
    made.close()


# Messages


@given(st.lists(st.tuples(st.dictionaries(st.text(), st.integers() | st.text()), st.binary(max_size=50))), st.data())
def test_messages_arrive_whole_however_the_stream_is_cut(messages, data):
    stream, frames = b"".join(frame(*one) for one in messages), Frames()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert [one for piece in pieces for one in frames.feed(piece)] == messages


def test_a_stream_of_something_else_is_refused():
    with pytest.raises(BrimError, match="not the protocol"):
        list(Frames().feed(b"GET / HTTP/1.1\r\n"))


@pytest.mark.parametrize(
    "error",
    [Overloaded("later", 2.5), ImageError("no image"), NotFound("no such model", field="model"), BrimError("so")],
)
def test_errors_cross_as_they_are(error):
    found = error_of(failure(7, error))

    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_every_error_crosses():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BrimError)]
    for kind in set(kinds):
        error = error_of(failure(1, kind("words")))
        assert type(error) is kind
        assert "words" in str(error)


def test_what_nobody_foresaw_crosses_without_its_words():
    found = error_of(failure(7, ValueError("secret /path")))

    assert isinstance(found, RuntimeError)
    assert "secret" not in str(found)


def test_the_page_tells_estimates_and_marks():
    made = Shared.make(StatusPage.BYTES)
    written, read = StatusPage(made), StatusPage(made)
    assert read.estimates() == {}

    written.publish({"cells": [0.1, 0.25, 4.0], "ünï": [1.0, 1.0, 1.0]})
    written.mark(5, 2)

    assert read.estimates() == {"cells": [0.1, 0.25, 4.0], "ünï": [1.0, 1.0, 1.0]}
    assert [read.estimate("cells", within_s) for within_s in (0.01, 0.2, 0.3, 30, 600)] == [0.1, 0.1, 0.25, 4.0, 4.0]
    assert read.estimate("others", 1.0) is None
    assert [read.marked(ticket) for ticket in (4, 5)] == [0, 2]
    written.publish({"a" * 1000 + str(index): [1.0, 1.0, 1.0] for index in range(100)})
    assert read.estimates() == {}
    written.close(), read.close(), made.close()


# What an idle one takes


def test_without_a_model_a_predictor_imports_no_torch_no_framework_and_no_database():
    code = (
        "import sys, brim.service.prediction.process.main\n"
        "print(*{'torch', 'numpy', 'fastapi', 'starlette', 'uvicorn', 'sqlalchemy', 'dbos', 'pydantic', 'asyncio'}"
        " & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []


def test_an_idle_predictor_is_small_and_does_next_to_nothing(tmp_path):
    with Predicting(tmp_path, real=True) as predicting:
        pid = predicting.pid()
        until(lambda: predicting.settings.predict_sockets[0].exists())
        assert predicting.settings.predict_sockets[0].stat().st_mode & 0o777 == 0o600
        status = Path(f"/proc/{pid}/status").read_text().split()
        before, began_s = cpu_s(pid), time.monotonic()
        time.sleep(2.0)

        assert 1024 * int(status[status.index("VmRSS:") + 1]) < 60e6
        assert (cpu_s(pid) - before) / (time.monotonic() - began_s) < 0.02


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
