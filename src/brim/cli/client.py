"""A client of the service's HTTP interface, with one connection per request; errors keep the service's own messages.

It uses `http.client` alone: no dependency, no proxy between us and this machine, no redirect that takes the token
elsewhere.
"""

import http.client
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode, urlsplit

from brim.errors import BrimError, ConfigError, Conflict, NotFound, StorageError, TooMany, Unavailable

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 60.0  # event streams send a line at least every 15 s
RETRY_S = 1.0
MAX_LINE = 2**20  # bytes of an event; longer ones are cut, and then are not JSON
AWAY_S = 120.0  # how long a watcher waits for a service that does not answer
_TOKEN_HINT = "give {data} of the service, {token_file} or BRIM_TOKEN"
_FAMILIES: Mapping[int, type[BrimError]] = {404: NotFound, 409: Conflict, 429: TooMany, 503: Unavailable}


_COMMANDS: Mapping[str, str] = {"training/jobs": "jobs", "datasets": "datasets", "runs": "runs", "models": "models"}
_ROUTE = re.compile(rf'"GET /api/({"|".join(_COMMANDS)})"')  # what the service advises is a command here


@dataclass(frozen=True, slots=True)
class ServerEvent:
    id: str
    kind: str
    data: dict[str, Any]


class ServiceClient:
    """Requests to one service, with its token."""

    def __init__(self, url: str, token: str, again: str = "") -> None:
        """again: the options that name this service, for the commands that are suggested next."""
        self.again = again
        self.url = url.rstrip("/")
        self._token = token
        try:
            parts = urlsplit(self.url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            raise ConfigError("must be http://HOST:PORT", field="url", value=url) from None
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.username:
            raise ConfigError("must be http://HOST:PORT, without user or query", field="url", value=url)
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._prefix = parts.path

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """The object at a path; parameters that are None are left out."""
        parameters = urlencode({name: value for name, value in query.items() if value is not None})
        return self._request("GET", f"{path}?{parameters}" if parameters else path)

    def get_patiently(self, path: str) -> dict[str, Any]:
        """The object at a path; waits for a service that restarts."""
        end_s = time.monotonic() + AWAY_S
        while True:
            try:
                return self.get(path)
            except Unavailable:
                if time.monotonic() > end_s:
                    raise
                time.sleep(RETRY_S)

    def post(self, path: str, body: bytes = b"", **headers: str) -> dict[str, Any]:
        kind = {"Content-Type": "application/json"} if body else {}
        return self._request("POST", path, body, **kind, **headers)

    def delete(self, path: str) -> None:
        self._request("DELETE", path)

    def events(self, path: str) -> Iterator[ServerEvent]:
        """Events until the service ends the stream; a broken stream is resumed after its last event.

        Waits for a service that restarts, but the first connection must succeed.
        """
        last, connected, away_s = "", False, 0.0  # away_s: when it stopped answering
        while True:
            try:
                with self._answer("GET", path, headers={"Last-Event-ID": last} if last else {}) as answer:
                    for event in read_events(answer):
                        last, connected, away_s = event.id or last, True, 0.0
                        yield event
                return
            except Unavailable:
                away_s = away_s or time.monotonic()
                if not connected or time.monotonic() - away_s > AWAY_S:
                    raise
                time.sleep(RETRY_S)

    def _request(self, method: str, path: str, body: bytes = b"", **headers: str) -> dict[str, Any]:
        with self._answer(method, path, body, headers) as answer:
            text = answer.read()
        return _object(text) if text else {}

    @contextmanager
    def _answer(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request, to be read; an error status is raised as the error it stands for."""
        connection = self._kind(self._host, self._port, timeout=TIMEOUT_S)
        own = {"Authorization": f"Bearer {self._token}", "Accept": "application/json, text/event-stream"}
        try:
            connection.request(method, self._prefix + path, body or None, {**own, **(headers or {})})
            answer = connection.getresponse()
            if answer.status >= http.client.MULTIPLE_CHOICES:
                raise _failure(answer.status, answer.read())
            yield answer
        except (OSError, http.client.HTTPException) as failure:
            known = (failure.strerror or "").lower() if isinstance(failure, OSError) else "it closed the connection"
            reason = "it did not answer in time" if isinstance(failure, TimeoutError) else known or str(failure)
            hint = 'start one with "brim serve", or give {url}'
            raise Unavailable(f"no service at {self.url}: {reason}", hint=hint) from failure
        finally:
            connection.close()


def find_token(token_file: Path | None, data: Path | None) -> str:
    """The token: from --token-file, from BRIM_TOKEN, or from the data directory."""
    from brim.service.settings import data_folder
    from brim.service.token import find

    if token_file is not None:
        try:
            return token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as failure:
            reason = getattr(failure, "strerror", None) or "it is not text"
            raise StorageError(f"{token_file} cannot be read: {reason}", field="token_file") from failure
    file = data_folder(data) / "token"
    token = find(file, os.environ)
    if token is None:
        raise ConfigError(f"no token: {file} does not exist", hint=_TOKEN_HINT)
    return token


def _failure(status: int, text: bytes) -> BrimError:
    """The error that a service's answer stands for, in its own sentence."""
    if status == http.client.UNAUTHORIZED:
        return ConfigError("the service rejects the token", hint=_TOKEN_HINT)
    try:
        answer = json.loads(text)
        told = [(str(one["detail"]), one.get("field")) for one in answer.get("errors") or [answer]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        told = [(f"the service answered {status} {http.client.responses.get(status, '')}".strip(), None)]
    faults = list[BrimError]()
    for said, field in told:
        sentence = _ROUTE.sub(lambda match: f'"brim {_COMMANDS[match[1]]} list"', said)
        if field and str(field) not in sentence:
            sentence = f"{field}: {sentence}"
        faults.append(_FAMILIES.get(status, ConfigError)(sentence))
    faults[0].more = tuple(faults[1:])
    return faults[0]


def _object(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise Unavailable("the answer is not a JSON object", hint="is there another program at {url}?")
    return answer


def read_events(stream: IO[bytes]) -> Iterator[ServerEvent]:
    """Parse a stream of events; lines that begin with a colon only keep it alive."""
    fields: dict[str, str] = {}
    while line := stream.readline(MAX_LINE):
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as failure:
            raise Unavailable("the answer is not text", hint="is there another program at {url}?") from failure
        if text:
            name, _, value = text.partition(":")
            value = value.removeprefix(" ")
            fields[name] = f"{fields[name]}\n{value}" if name == "data" and name in fields else value
        elif "data" in fields:
            yield ServerEvent(fields.get("id", ""), fields.get("event", "message"), _object(fields["data"].encode()))
            fields = {}
        else:
            fields = {}
