"""Event streams: a snapshot, then what happens; replay from any number without gap or repeat."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

from live_api import JOBS, TOKEN, Api

from brim.jobs.status import JobProgress
from waiting import PATIENCE_S, until


class Event(NamedTuple):
    id: int
    kind: str
    data: dict[str, Any]


class Stream:
    """One client of a stream."""

    def __init__(self, api: Api, job_id: str, last: int | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=PATIENCE_S)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        if last is not None:
            headers["Last-Event-ID"] = str(last)
        self._connection.request("GET", f"{JOBS}/{job_id}/events", headers=headers)
        self.answer = self._connection.getresponse()

    def __iter__(self) -> Iterator[Event]:
        found: dict[str, str] = {}
        while line := self.answer.readline().decode():
            name, _, value = line.rstrip("\n").partition(": ")
            if name in ("id", "event", "data"):
                found[name] = value
            elif not line.strip() and found:
                yield Event(int(found["id"]), found["event"], json.loads(found["data"]))
                found = {}

    def take(self, num: int) -> list[Event]:
        return [event for _, event in zip(range(num), self, strict=False)]

    def close(self) -> None:
        self._connection.close()


def stream(api: Api, job_id: str, last: int | None = None) -> closing[Stream]:
    return closing(Stream(api, job_id, last))


def begin(api: Api) -> str:
    job_id = str(api.submit()["id"])
    api.start(job_id)
    return job_id


def tell(api: Api, job_id: str, first: int, num: int) -> None:
    for current in range(first, first + num):
        api.catalogue.jobs.tell(job_id, JobProgress(current=current, total=1000, message="making"))


def test_a_stream_begins_with_the_job_and_ends_with_it(api):
    job_id = begin(api)
    with stream(api, job_id) as watching:
        assert watching.answer.status == 200
        assert watching.answer.headers["content-type"].startswith("text/event-stream")
        assert watching.answer.headers["cache-control"] == "no-store"
        (first,) = watching.take(1)
        tell(api, job_id, 1, 3)
        api.finish(job_id)
        rest = list(watching)

    assert (first.kind, first.data["id"], first.data["status"]) == ("status", job_id, "running")
    assert [event.kind for event in rest] == ["progress"] * 3 + ["status"]
    assert [event.id for event in rest] == [first.id + n for n in range(1, 5)]
    assert rest[0].data["current"] == 1
    assert rest[-1].data["status"] == "completed"


def test_reconnecting_gives_what_came_meanwhile_without_gap_or_repeat(api):
    job_id = begin(api)
    writer = threading.Thread(target=tell, args=[api, job_id, 1, 120])
    writer.start()
    seen: list[Event] = []
    while len(seen) < 100:  # hang up after every few events, while more are being written
        with stream(api, job_id, seen[-1].id if seen else 0) as watching:
            seen += watching.take(7)
    writer.join()
    api.finish(job_id)
    with stream(api, job_id, seen[-1].id) as watching:
        seen += list(watching)

    assert [event.id for event in seen] == list(range(1, len(seen) + 1))
    assert [event.data["current"] for event in seen if event.kind == "progress"] == list(range(1, 121))
    assert seen[-1].data["status"] == "completed"


def test_a_finished_job_is_told_once_and_the_stream_ends(api):
    job_id = begin(api)
    api.finish(job_id)
    head = api.catalogue.jobs.get(job_id).event_seq

    with stream(api, job_id) as watching:
        assert [(event.id, event.data["status"]) for event in watching] == [(head, "completed")]
    with stream(api, job_id, head) as watching:
        assert list(watching) == []
    with stream(api, job_id, head + 1000) as watching:
        assert [event.id for event in watching] == [head], "a number of another time: from the start"
    with stream(api, job_id, 1) as watching:
        assert [event.id for event in watching] == list(range(2, head + 1)), "none is left out"


def test_an_end_in_the_past_does_not_end_the_stream_of_a_job_that_was_resumed(api):
    job_id = str(api.submit()["id"])
    api.post(f"{JOBS}/{job_id}/cancel")
    api.post(f"{JOBS}/{job_id}/resume")
    with stream(api, job_id, 0) as watching:
        past = watching.take(api.catalogue.jobs.get(job_id).event_seq)
        assert "cancelled" in [event.data["status"] for event in past]
        assert past[-1].data["status"] == "queued"
        api.post(f"{JOBS}/{job_id}/cancel")
        assert [event.data["status"] for event in watching][-1] == "cancelled"


def test_a_place_is_given_back_when_its_client_is_gone(api_with):
    with api_with(max_watchers=2) as api:
        job_id = begin(api)
        first, second = Stream(api, job_id), Stream(api, job_id)
        first.take(1)
        second.take(1)
        refused = api.get(f"{JOBS}/{job_id}/events")
        assert refused.status == 503
        assert "retry-after" in refused.headers

        first.answer.close()
        first.close()
        hub = api.api.state.context.hub
        until(lambda: hub.num_watchers == 1)
        with stream(api, job_id) as third:
            assert third.answer.status == 200
        second.close()


def test_a_watcher_that_is_behind_gets_what_is_not_cached_any_more(api):
    job_id = begin(api)
    with stream(api, job_id) as ahead:  # from now on events are cached
        ahead.take(1)
        tell(api, job_id, 1, 3)
        last = ahead.take(3)[-1].id
        with stream(api, job_id, 1) as behind:
            api.finish(job_id)
            ids = [event.id for event in behind]

    assert ids == list(range(2, last + 2))


def test_going_down_ends_the_streams_and_does_not_wait_for_their_clients(api_with, monkeypatch):
    monkeypatch.setattr("brim.service.api.main.GRACE_S", 10 * PATIENCE_S)
    with api_with() as api:
        job_id = begin(api)
        watching = Stream(api, job_id)
        watching.take(1)

    assert list(watching) == []
    watching.close()
