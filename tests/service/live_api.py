"""A real API behind a real socket: a SQLite catalogue, the durable queue, and no workers unless a test has one."""

import http.client
import io
import json
import re
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from in_process import ThreadReader
from PIL import Image

from brim.jobs import durable
from brim.jobs.durable import Queue
from brim.jobs.store import Catalogue, DatasetRow, Output, upgrade
from brim.service.api.app import guard, make_api
from brim.service.api.main import ApiServer, make_server
from brim.service.prediction.client import Predictions
from brim.service.reader.client import Reader
from brim.service.settings import MIB, Settings
from waiting import PATIENCE_S, until

TOKEN = "a-token-of-tests_0123456789"
GENERATION = {
    "dataset_name": "gpu_batch_test",
    "num_samples": 10000,
    "dataset_type": "feature_based",
    "config": {"frequency_mhz": 145.0, "tx_power_dbm": 30.0, "min_snr_db": 3.0, "max_gdop": 100.0},
}
JOBS = "/api/training/jobs"
BOUNDARY = "a-boundary"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
Part = tuple[str, str | None, bytes]  # of a form: field, file name, content
_SECRETS = re.compile(r"Traceback|sqlalchemy|dbos\.|psycopg", re.IGNORECASE)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]  # lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Api:
    """One running API and what lies behind it."""

    settings: Settings
    catalogue: Catalogue
    queue: Queue
    api: Any
    port: int = 0
    _server: ApiServer | None = None
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        made = socket.create_server(("127.0.0.1", self.port))
        listening = socket.socket(fileno=made.detach())  # as the service has it; asyncio then turns Nagle's wait off
        self.port = listening.getsockname()[1]
        self._server = make_server(guard(self.api), self.api.state.context.hub.close, self.settings)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()
        until(lambda: self._server and self._server.started, say=lambda: "the server starts")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server did not go down"

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        token: str | None = TOKEN,
        timeout_s: float = PATIENCE_S,
    ) -> Answer:
        """One request; a body that is no bytes is sent as JSON."""
        sent = {} if token is None else {"Authorization": f"Bearer {token}"}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        sent.update(headers or {})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            found = Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()
        self.check(path, found)
        return found

    def check(self, path: str, answer: Answer) -> None:
        """What holds for every answer: no 500, nothing of this machine, our headers, our shape of refusal."""
        assert answer.status != 500, f"{path}: {answer.body!r}"
        if path.startswith("/docs/assets"):
            return
        is_binary = answer.headers.get("content-type") in ("image/png", "application/zip")
        text = ("" if is_binary else answer.body.decode(errors="replace")) + repr(answer.headers)
        text = re.sub(r'"picture":"[A-Za-z0-9+/=]*"', "", text)  # base64 may hold any short name
        text = re.sub(r"[A-Za-z0-9_-]{40,}", "", text)  # nor what is random
        assert str(self.settings.data) not in text, f"{path} says where the data is"
        assert socket.gethostname() not in text, f"{path} says the host's name"
        assert not _SECRETS.search(text), f"{path}: {text[:300]}"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "server" not in answer.headers
        is_page = answer.headers.get("content-type", "").startswith("text/html")
        if answer.status >= 400 and path != "/ready" and answer.body and not is_page:
            assert answer.json.keys() - {"errors"} == {"detail", "field"}, path
            assert answer.json["detail"].strip()
            assert "\n" not in answer.json["detail"]

    def get(self, path: str, **options: Any) -> Answer:
        return self.ask("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return self.ask("POST", path, body, **options)

    def delete(self, path: str, **options: Any) -> Answer:
        return self.ask("DELETE", path, **options)

    def send(self, path: str, *parts: Part, **headers: str) -> Answer:
        """A form of files and fields."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.post(path, multipart(parts), headers={**FORM, **sent})

    def connect(
        self, method: str, path: str, body: bytes = b"", *, upto: int | None = None, head: str = ""
    ) -> socket.socket:
        """A request of which the body is sent so far; further lines of its head may be given."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        length = f"Content-Length: {len(body)}\r\nContent-Type: {FORM['Content-Type']}\r\n" if body else ""
        lines = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n{length}{head}\r\n"
        connection.sendall(lines.encode() + body[:upto])
        return connection

    @property
    def context(self) -> Any:
        """What the routes work with."""
        return self.api.state.context

    @property
    def predictions(self) -> Any:
        return self.context.predictions

    def uploads(self) -> list[Path]:
        """What uploads, exports and deletions have left behind so far."""
        return [*(self.settings.data / "uploads").iterdir(), *(self.settings.data / "trash").iterdir()]

    def submit(self, body: Any = GENERATION, **headers: str) -> dict[str, Any]:
        answer = self.post(JOBS, body, headers={name.replace("_", "-"): value for name, value in headers.items()})
        assert answer.status == 202, answer.body
        return dict(answer.json)

    def start(self, job_id: str) -> None:
        """What a worker does when it takes a job, as far as people see it."""
        assert self.catalogue.jobs.move(job_id, "running", of=["pending", "queued"], worker="w0")

    def finish(self, job_id: str, items: int = 1, **changes: Any) -> None:
        assert self.catalogue.jobs.move(job_id, "completed", of=["running"], output=Output(items=items), **changes)

    def write_dataset(self, name: str, samples: int = 8, **config: Any) -> str:
        """A dataset of radio samples, as the command line adds one; its id."""
        from brim.rf import from_mapping
        from brim.rf.generation.dataset import generate

        generate(from_mapping(config), self.settings.data / "datasets" / name, samples, device="cpu")
        return self.add_dataset(name=name, path=f"datasets/{name}", items=samples).id

    def add_dataset(self, **values: Any) -> DatasetRow:
        """A dataset that no job made, as the command line adds one."""
        known = {"name": "brought", "kind": "rf", "path": "datasets/x", "owned": True, "items": 100, "bytes": 1000}
        return self.catalogue.datasets.add(**{**known, **values})


@cache
def _migrated() -> dict[str, bytes]:
    """The databases of an empty data directory, by file name: to make them takes longer than most tests."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data=Path(folder), token=TOKEN)
        upgrade(settings.catalogue_url)
        durable.migrate(settings.jobs_url)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def make(data: Path, predictions: Predictions | None = None, reader: Reader | None = None, **changes: Any) -> Api:
    """An API on a data directory, migrated; start it with `with`."""
    settings = replace(Settings(data=data, token=TOKEN, min_free_bytes=MIB), **changes)
    is_new = not (data / "catalogue.sqlite").exists()
    settings.make_folders()
    if settings.database is None and is_new:
        for name, content in _migrated().items():
            (data / name).write_bytes(content)
    else:
        upgrade(settings.catalogue_url)
        durable.migrate(settings.jobs_url)
    catalogue, queue = Catalogue.open(settings.catalogue_url), Queue(settings.jobs_url)
    api = make_api(settings, catalogue, queue, predictions, reader or ThreadReader())
    return Api(settings, catalogue, queue, api)


@contextmanager
def running(data: Path, cells: Path | None = None, **changes: Any) -> Iterator[Api]:
    """The same, running; with weights, there is a model called cells."""
    made = make(data, **changes)
    if cells is not None:
        made.catalogue.models.put(name="cells", kind="segment", network="unet_tiny", path=str(cells))
    try:
        with made:
            yield made
    finally:
        made.queue.close()
        made.catalogue.close()


# Files


def multipart(parts: Sequence[Part]) -> bytes:
    body = b""
    for name, file, content in parts:
        named = "" if file is None else f'; filename="{file}"'
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
        body += head.encode() + content + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


def picture(width: int = 6, height: int = 4, kind: str = "PNG", seed: int = 0) -> bytes:
    """An image of noise, as a file."""
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)).save(out, kind)
    return out.getvalue()


def array(*shape: int) -> bytes:
    """A NumPy array, as a file."""
    out = io.BytesIO()
    np.save(out, np.random.default_rng(0).normal(size=shape).astype(np.float32))
    return out.getvalue()
