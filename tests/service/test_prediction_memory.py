"""Between the API and a prediction process: shared bytes, messages, the page; and what an idle predictor takes."""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predicting import Predicting

from brim import errors
from brim.errors import BrimError, NotFound, Overloaded
from brim.jobs import sandbox
from brim.service.prediction.channel import Channel, SharedBytes, StatusPage, error_of, failure, view_of
from waiting import until

# Shared bytes


def test_nobody_can_change_shared_bytes_or_cut_them_off_under_a_reader():
    shared = SharedBytes.of(b"x" * 8192)
    view = shared.view
    for attempt in (lambda: os.ftruncate(shared.descriptor, 0), lambda: os.write(shared.descriptor, b"y")):
        with pytest.raises(PermissionError):
            attempt()
    shared.close()
    assert bytes(view) == b"x" * 8192
    open_to_change = SharedBytes()
    open_to_change.append(b"x" * 8192)
    with pytest.raises(ValueError, match="cut off"):
        view_of(open_to_change)


# Messages


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.dictionaries(st.text(), st.integers() | st.text()), st.integers(0, 100_000)), max_size=40))
def test_messages_arrive_whole_and_in_order_also_through_a_full_socket(messages):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    full: list[bool] = []
    sender, receiver = Channel(ours, lambda: full.append(True)), Channel(theirs, lambda: None)
    sent = [(message, os.urandom(length)) for message, length in messages]
    for message, body in sent:
        sender.send(message, body)
    received = []
    while len(received) < len(sent):
        while (one := receiver.receive()) is not None:
            received.append((one[0], bytes(view_of(one[1]))))
        sender.flush()

    assert received == sent
    assert not sender.has_unsent
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()


def test_a_request_that_was_cancelled_before_it_was_sent_is_left_out():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = Channel(ours, lambda: None), Channel(theirs, lambda: None)
    shared = [SharedBytes.of(b"z" * 100) for _ in range(2000)]
    for number, one in enumerate(shared):
        sender.send({"id": number, "name": "x" * 1000}, one)
    assert sender.has_unsent
    shared[-2].close()
    ids = []
    while not ids or ids[-1] != 1999:
        while (one := receiver.receive()) is not None:
            ids.append(one[0]["id"])
        sender.flush()

    assert ids == [*range(1998), 1999]
    sender.close(), receiver.close()


def test_errors_cross_as_they_are_and_what_nobody_foresaw_without_its_words():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BrimError)]
    for error in (*(kind("words") for kind in kinds), Overloaded("later", 2.5), NotFound("no model", field="model")):
        found = error_of(failure(7, error))
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))

    assert "secret" not in str(error_of(failure(7, ValueError("secret /path"))))


def test_the_page_tells_estimates_and_marks():
    written = StatusPage()
    read = StatusPage(written.shared.view)
    assert read.estimates() == {}

    written.publish({"cells": [0.1, 0.25, 4.0], "ünï": [1.0, 1.0, 1.0]})
    written.mark(5, True)

    assert read.estimates() == {"cells": [0.1, 0.25, 4.0], "ünï": [1.0, 1.0, 1.0]}
    assert [read.estimate("cells", within_s) for within_s in (0.01, 0.2, 0.3, 30, 600)] == [0.1, 0.1, 0.25, 4.0, 4.0]
    assert read.estimate("others", 1.0) is None
    assert [read.is_marked(ticket) for ticket in (4, 5)] == [False, True]
    written.publish({"a" * 1000 + str(index): [1.0, 1.0, 1.0] for index in range(100)})
    assert read.estimates() == {}


# What an idle one takes


def test_an_idle_predictor_is_small_and_reaches_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIM_TEST_EXEC", "1")  # not forked from a process that has torch
    with Predicting(tmp_path, real=True) as predicting:
        pid = predicting.pid()
        until(lambda: predicting.settings.predict_sockets[0].exists())
        assert predicting.settings.predict_sockets[0].stat().st_mode & 0o777 == 0o600
        status = Path(f"/proc/{pid}/status").read_text().split()
        assert 1024 * int(status[status.index("VmRSS:") + 1]) < 60e6
        assert "no network" not in sandbox.available() or status[status.index("Seccomp:") + 1] == "2"
