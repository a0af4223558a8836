"""A job's events as a stream: those after the client's last one, then new ones as they happen.

One poller asks the catalogue for all watched jobs together; new events are read once and cached, so that many watchers
of a job cost as much as one. Each watcher continues from its own last number, from the cache or from the catalogue, so
none is missed or repeated, however slowly it reads or often it reconnects.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from brim.errors import Unavailable
from brim.jobs.status import FINISHED
from brim.jobs.store import EventRow, EventTable, JobRow
from brim.service.api.body import unless_gone
from brim.service.api.errors import problem
from brim.service.api.shapes import redacted

log = logging.getLogger(__name__)

POLL_S = 0.5
KEEP_ALIVE_S = 15.0  # proxies close silent connections
SEND_S = 30.0  # a client that reads nothing for so long is dropped; it may reconnect
RECENT = 500  # events of a job kept in memory
RETRY_MS = 2000  # after which a browser connects again


class Hub:
    """All watchers of all jobs."""

    def __init__(self, events: EventTable, *, limit: int) -> None:
        self._events, self._limit = events, limit
        self._watched: dict[str, _WatchedJob] = {}
        self._poller: asyncio.Task[None] | None = None
        self.num_watchers = 0
        self.is_closed = False

    def close(self) -> None:
        """End all streams; their clients reconnect to the next process."""
        self.is_closed = True
        for job in self._watched.values():
            job.wake()
        if self._poller is not None:
            self._poller.cancel()

    @contextmanager
    def watch(self, job_id: str, after: int) -> Iterator["_WatchedJob"]:
        """Watch a job; Unavailable if there are too many watchers."""
        if self.is_closed or self.num_watchers >= self._limit:
            raise Unavailable(f"{self.num_watchers} event streams are open, the most at once; close one or try later")
        job = self._watched.setdefault(job_id, _WatchedJob(job_id, after))
        job.num_watchers += 1
        self.num_watchers += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            yield job
        finally:
            self.num_watchers -= 1
            job.num_watchers -= 1
            if not job.num_watchers:
                self._watched.pop(job_id, None)

    async def next(self, job: "_WatchedJob", seq: int, timeout_s: float) -> list[EventRow]:
        """Events after a number; empty after a time-out, or when the job itself should be looked at."""
        news = job.news  # taken before reading, so that events in between are not missed
        events = await self._after(job, seq)
        if not events and not self.is_closed:
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), timeout_s)
            events = await self._after(job, seq)
        return events

    async def _after(self, job: "_WatchedJob", seq: int) -> list[EventRow]:
        """Events after a number, from the cache if it reaches back far enough."""
        if job.is_polled and job.head <= seq:
            return []
        if job.recent and job.recent[0].seq <= seq + 1:
            return [event for event in job.recent if event.seq > seq]
        try:
            return await run_in_threadpool(self._events.after, job.id, seq)
        except Unavailable:
            await asyncio.sleep(POLL_S)
            return []

    async def _poll(self) -> None:
        while self._watched and not self.is_closed:
            try:
                heads = await run_in_threadpool(self._events.heads, list(self._watched))
                for job in list(self._watched.values()):
                    await self._read_on(job, heads.get(job.id))
            except Unavailable as failure:
                log.warning("events: %s", failure)  # the streams stay open and continue when it answers again
            except Exception:  # without a poller every watcher would wait for ever
                log.exception("events cannot be read")
            await asyncio.sleep(POLL_S)

    async def _read_on(self, job: "_WatchedJob", head: int | None) -> None:
        if head is None:
            job.wake()  # the job was deleted: its watchers notice and end
            return
        while job.head < head:
            events = await run_in_threadpool(self._events.after, job.id, job.head)
            if not events:
                break
            job.recent.extend(events)
            job.head = events[-1].seq
            job.wake()
        job.is_polled = True


class _WatchedJob:
    """The newest number of one job's events, and those that arrived while it is watched."""

    def __init__(self, id: str, head: int) -> None:
        self.id, self.head, self.num_watchers = id, head, 0
        self.is_polled = False  # the head is the catalogue's, not only that of its first watcher
        self.recent: deque[EventRow] = deque(maxlen=RECENT)
        self.news = asyncio.Event()  # set when events arrive, then replaced

    def wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class EventStream(Response):
    """A job's events to one client, until the job has ended or the client is gone."""

    media_type = "text/event-stream"

    def __init__(
        self,
        hub: Hub,
        find_job: Callable[[], JobRow | None],
        *,
        job_id: str,
        after: int,
        snapshot: dict[str, Any] | None,
        redact: Callable[[str], str],
    ) -> None:
        """after is the last event the client has; snapshot is sent first."""
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._hub, self._find_job, self._job_id, self._after = hub, find_job, job_id, after
        self._snapshot, self._redact = snapshot, redact

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            gone = suppress(ClientDisconnect, TimeoutError, OSError)  # the client, or it reads nothing
            with self._hub.watch(self._job_id, self._after) as job, gone:
                async with unless_gone(Request(scope, receive)):
                    await self._stream(job, send)
        except Unavailable as failure:  # before the first byte: see watch
            await problem(503, str(failure))(scope, receive, send)

    async def _stream(self, job: _WatchedJob, send: Send) -> None:
        seq = self._after  # of the last event sent
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        first = f"retry: {RETRY_MS}\n\n".encode()
        if self._snapshot is not None:
            first += message("status", self._snapshot, self._after)
        await _send(send, first)
        over = await self._is_over(seq)
        while not over and not self._hub.is_closed:
            events = await self._hub.next(job, seq, KEEP_ALIVE_S)
            seq = events[-1].seq if events else seq
            messages = [message(event.kind, redacted(event.data, self._redact), event.seq) for event in events]
            await _send(send, b"".join(messages) or b": keep-alive\n\n")
            if not events or any(event.kind == "status" for event in events):
                over = await self._is_over(seq)
        await send({"type": "http.response.body", "body": b""})

    async def _is_over(self, seq: int) -> bool:
        """Whether the job has ended or was deleted; False while the catalogue does not answer."""
        try:
            job = await run_in_threadpool(self._find_job)
        except Unavailable:
            return False
        return job is None or (job.status in FINISHED and job.event_seq <= seq)


async def _send(send: Send, body: bytes) -> None:
    await asyncio.wait_for(send({"type": "http.response.body", "body": body, "more_body": True}), SEND_S)


def message(kind: str, data: Any, seq: int) -> bytes:
    text = json.dumps(data, ensure_ascii=False)
    return f"id: {seq}\nevent: {kind}\ndata: {text}\n\n".encode(errors="replace")
