"""Who may do what: the shared token, named tokens with a role, and a log of what was done with them.

Named tokens are in the file `tokens.json` of the data directory, which only its owner can read; it holds the SHA-256 of
each token, not the token. It is looked at before every request without the shared token, so that a revoked token ends
at once in all processes, also while the database is away. What was done is appended to `actions.jsonl`.

viewer          reads everything but the tokens and the log
operator        also submits, stops, uploads, predicts and deletes
administrator   also adds models, and tokens; reads the log. The shared token has this role
"""

import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from brim.errors import ConfigError, Conflict, NotFound, StorageError
from brim.jobs.worker.process import FileLock
from brim.service.settings import ROLES
from brim.service.token import equals, session_value, write_secret

log = logging.getLogger(__name__)

Role = Literal["viewer", "operator", "administrator"]
SHARED: Final = "shared token"  # has a space, as no name of a token has
ADMINISTRATION: Final = ("/api/tokens", "/api/actions")  # by administrators alone, also to read
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}$"
MAX_DAYS: Final = 3650
_NAME = re.compile(NAME_PATTERN)
_PREFIX = "brim_"  # other texts are no named tokens: the file is not asked for them
_DAY_S = 86_400
_LOCK_S = 10.0


@dataclass(frozen=True, slots=True)
class Actor:
    """Who sent a request."""

    name: str
    role: Role
    session: str  # value of the cookie that stands for this actor


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedToken:
    """A token of one person or program, or a session of a person who signed in at a provider."""

    name: str
    role: Role
    sha256: str
    source: Literal["token", "sign-in"]
    created_at: float
    expires_at: float | None = None

    @property
    def is_valid(self) -> bool:
        return self.expires_at is None or time.time() < self.expires_at


class Access:
    """The actors of one data directory; `token` is the shared one."""

    def __init__(self, data: Path, token: str) -> None:
        if not token:
            raise ValueError("a service needs a token")
        self.tokens = TokenFile(data)
        self._token = token
        self._shared = Actor(SHARED, "administrator", session_value(token))
        self.service = sha256(self._shared.session.encode()).hexdigest()[:8]  # tells services of one host apart

    def of_token(self, text: str) -> Actor | None:
        if equals(text, self._token):
            return self._shared
        if not text.startswith(_PREFIX):
            return None
        digest = sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        return next((self.actor(each) for each in self._valid() if hmac.compare_digest(each.sha256, digest)), None)

    def of_session(self, value: str) -> Actor | None:
        if equals(value, self._shared.session):
            return self._shared
        return next((actor for actor in map(self.actor, self._valid()) if equals(value, actor.session)), None)

    def actor(self, token: NamedToken) -> Actor:
        """Its session ends with the named token, and with the shared one."""
        return Actor(token.name, token.role, session_value(f"{self._token} {token.sha256}"))

    def _valid(self) -> list[NamedToken]:
        try:
            return [each for each in self.tokens.all() if each.is_valid]
        except StorageError as failure:  # the shared token still counts, and nobody else
            log.error("%s", failure)
            return []


class TokenFile:
    """The named tokens, oldest first; every method is complete when it returns, in all processes."""

    def __init__(self, data: Path) -> None:
        self.file = data / "tokens.json"
        self._read: tuple[tuple[int, ...], list[NamedToken]] = ((), [])

    def all(self) -> list[NamedToken]:
        """As they are now; read again only if the file has changed."""
        try:
            about = self.file.stat()
            version = (about.st_mtime_ns, about.st_ino, about.st_size)
            if version != self._read[0]:
                rows = json.loads(self.file.read_bytes())["tokens"]
                self._read = version, [_token(row) for row in rows]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, LookupError, TypeError) as failure:
            reason = getattr(failure, "strerror", None) or "it is damaged"
            text = f"{self.file.name} in the data directory cannot be read: {reason}"
            raise StorageError(text, hint="restore it from a copy, or remove it, which ends all named tokens") from None
        return self._read[1]

    def add(self, name: str, role: str, days: float | None = None) -> tuple[NamedToken, str]:
        """A new token and its text, which is not kept."""
        _check(name, role, days)
        text = _PREFIX + secrets.token_urlsafe(32)
        made = _new(name, role, text, "token", None if days is None else days * _DAY_S)
        with self._changing() as known:
            if any(each.name == name and each.is_valid for each in known):
                raise Conflict("names a token already", field="name", value=name, hint="revoke it, or choose another")
            known[:] = [*(each for each in known if each.name != name), made]
        return made, text

    def sign_in(self, name: str, role: Role, seconds: float) -> NamedToken:
        """A person whom a provider knows: one session, however often and wherever they sign in."""
        made = _new(name, role, secrets.token_urlsafe(32), "sign-in", seconds)
        with self._changing() as known:
            earlier = next((each for each in known if each.name == name and each.is_valid), None)
            if earlier is not None and earlier.source == "token":
                raise Conflict(f'"{name}" is the name of a token', hint="the administrator can revoke that token")
            if earlier is not None:
                made = NamedToken(**{**asdict(made), "sha256": earlier.sha256, "created_at": earlier.created_at})
            known[:] = [*(each for each in known if each.name != name and each.is_valid), made]
        return made

    def revoke(self, name: str) -> NamedToken:
        with self._changing() as known:
            gone = next((each for each in known if each.name == name), None)
            if gone is None:
                raise NotFound(f'no token has the name "{name[:100]}"', hint='see them with "{tokens list}"')
            known.remove(gone)
        return gone

    @contextmanager
    def _changing(self) -> Iterator[list[NamedToken]]:
        """The tokens, to be changed in place and then written; one process at a time."""
        try:
            lock = FileLock(self.file.with_suffix(".lock")).wait(_LOCK_S)
        except OSError as failure:
            raise StorageError(f"{self.file} cannot be written: {failure.strerror}") from failure
        try:
            known = list(self.all())
            yield known
            write_secret(self.file, json.dumps({"tokens": [asdict(each) for each in known]}, indent=1))
        finally:
            lock.release()


class Actions:
    """What was done and by whom, one line each; a full disk loses lines, not requests."""

    def __init__(self, data: Path) -> None:
        self._file = data / "actions.jsonl"

    def note(self, by: str, role: str, action: str, *, about: str = "", status: int | None = None) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        entry = {"at": at, "by": by, "role": role, "action": action, "about": about[:300], "status": status}
        with suppress(OSError):
            handle = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(handle, json.dumps(entry).encode() + b"\n")  # whole: processes append to it
            finally:
                os.close(handle)

    def last(self, limit: int) -> list[dict[str, Any]]:
        """The newest first."""
        try:
            with self._file.open("rb") as lines:
                lines.seek(max(0, lines.seek(0, os.SEEK_END) - 2500 * limit))  # a line is shorter
                newest = lines.read().splitlines()[-limit:]
        except FileNotFoundError:
            return []
        entries = []
        for line in reversed(newest):
            with suppress(ValueError):
                entries.append(json.loads(line))
        return entries


def needed_role(method: str, path: str) -> Role:
    """The least role that may send such a request to the API."""
    if any(path == own or path.startswith(f"{own}/") for own in ADMINISTRATION):
        return "administrator"
    if method in ("GET", "HEAD", "OPTIONS"):
        return "viewer"
    return "administrator" if path == "/api/models" else "operator"


def may(role: Role, needed: Role) -> bool:
    return ROLES.index(role) >= ROLES.index(needed)


def _check(name: str, role: str, days: float | None) -> None:
    if not _NAME.match(name):
        text = "must be 1 to 100 letters, digits, dots, @, +, - and _, and begin with a letter or digit"
        raise ConfigError(text, field="name", value=name)
    if role not in ROLES:
        raise ConfigError(f"must be one of {', '.join(ROLES)}", field="role", value=role)
    if days is not None and not 0 < days <= MAX_DAYS:
        raise ConfigError(f"must be above 0 and at most {MAX_DAYS}", field="days", value=days)


def _new(name: str, role: str, text: str, source: str, seconds: float | None) -> NamedToken:
    now = time.time()
    digest = sha256(text.encode()).hexdigest()
    expires_at = None if seconds is None else now + seconds
    return NamedToken(name=name, role=role, sha256=digest, source=source, created_at=now, expires_at=expires_at)  # type: ignore[arg-type]


def _token(row: dict[str, Any]) -> NamedToken:
    made = NamedToken(**row)
    if made.role not in ROLES or not isinstance(made.sha256, str) or len(made.sha256) != 64:
        raise ValueError(made.name)
    return made
