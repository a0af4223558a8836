"""Where files are kept: a directory of this machine, or a prefix in an object store, behind one small interface.

A `Place` offers what datasets need, no more. Files are written completely or not at all. A store that does not answer
is retried for a while, with one warning; one that rejects a request raises at once. Credentials and endpoints come from
the environment, as the store's own tools read them, and are never printed.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from brim.errors import BrimError, ConfigError, StorageError

RETRY_S = 60.0  # how long a store that does not answer is retried; BRIM_STORAGE_RETRY_S changes it
FIRST_S = 10.0  # the same before its first answer: a wrong address should be reported soon

CONNECT_S, SILENT_S = 5, 60  # timeout for connecting and for reading
SLOWEST_BYTES_PER_S = 100_000  # slower uploads are aborted and retried
PART_BYTES = 16 * 2**20  # part of a large object; parts are requested in parallel

UNUSED_S = 30 * 86400.0  # after which an entry of the cache is removed
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.\-]*://")
_Result = TypeVar("_Result")
_log = logging.getLogger("brim")


def cache_home() -> Path:
    """brim's folder in the user's cache directory; it may not exist, or not be writable."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the specification says to ignore a relative path
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:  # a user without a home, as in some containers
            cache = Path(tempfile.gettempdir())
    return cache / "brim"


def cache_folder(name: str) -> Path | None:
    """A folder of brim's cache whose entries were used within a month; None if it cannot be made."""
    folder = cache_home() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for entry in folder.iterdir():
            if time.time() - entry.stat().st_mtime > UNUSED_S:
                shutil.rmtree(entry, ignore_errors=True)
    except OSError as failure:
        _log.warning("nothing is kept in %s (%s)", folder, failure.strerror or failure)
        return None
    return folder


def is_url(text: str | Path) -> bool:
    """Whether this is a URL such as s3://bucket/data, not a path."""
    return isinstance(text, str) and _URL.match(text) is not None


def place_of(where: "str | Path | Place") -> "Place":
    """The place that a path or a URL names; a file:// URL is a path. Nothing is accessed yet."""
    if isinstance(where, Place):
        return where
    if isinstance(where, Path) or not is_url(where):
        return LocalPlace(Path(where))
    if where.lower().startswith("file://"):
        return LocalPlace(_local_path(where))
    return ObjectPlace(where)


class Place(ABC):
    """A directory that is here or in an object store; names in it are relative, such as shards/000000.safetensors.

    A missing file raises FileNotFoundError; any other failure is a StorageError with a hint.
    Pickled, it opens again in another process.
    """

    path: Path | None  # the directory, where it is on this machine
    name: str  # the last part, for titles

    @abstractmethod
    def read_bytes(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """A file's bytes from start to stop; fewer where it ends before."""

    @abstractmethod
    def size(self, name: str) -> int: ...

    @abstractmethod
    def sizes(self, under: str = "") -> dict[str, int]:
        """Name → bytes of the files directly in a directory; none where it does not exist."""

    @abstractmethod
    def walk(self) -> list[str]:
        """Names of all files at any depth, sorted."""

    @abstractmethod
    def put_file(self, local: Path, name: str) -> None:
        """Copy a local file here, replacing an existing one; completely or not at all."""

    @abstractmethod
    def put_bytes(self, data: bytes, name: str) -> None:
        """Write a file, replacing an existing one; completely or not at all."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

    def names(self, under: str = "") -> list[str]:
        """Names of the files directly in a directory, sorted."""
        return sorted(self.sizes(under))

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def at(self, name: str) -> str:
        """The path or URL of a file in this place, for messages."""
        return f"{self}/{name}"


# This machine


@dataclass(frozen=True)
class LocalPlace(Place):
    """A directory of this machine; it need not exist until something is written to it."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:  # type: ignore[override]  # read-only here
        return self.path.resolve().name

    def read_bytes(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._refusals(name, "read"), (self.path / name).open("rb") as opened:
            opened.seek(start)
            return opened.read(-1 if stop is None else max(0, stop - start))

    def size(self, name: str) -> int:
        with self._refusals(name, "read"):
            if (self.path / name).is_dir():
                raise FileNotFoundError(errno.ENOENT, "is a directory", name)
            return (self.path / name).stat().st_size

    def sizes(self, under: str = "") -> dict[str, int]:
        with suppress(FileNotFoundError), self._refusals(under, "list"):
            return {entry.name: entry.stat().st_size for entry in (self.path / under).iterdir() if entry.is_file()}
        return {}

    def walk(self) -> list[str]:
        with self._refusals("", "list"):
            files = (file for file in self.path.rglob("*") if file.is_file())
            return sorted(str(file.relative_to(self.path)) for file in files)

    def put_file(self, local: Path, name: str) -> None:
        with self._new(name) as temporary:
            shutil.copyfile(local, temporary)

    def put_bytes(self, data: bytes, name: str) -> None:
        with self._new(name) as temporary:
            temporary.write_bytes(data)

    def remove(self, name: str) -> None:
        with self._refusals(name, "remove"):
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def _new(self, name: str) -> Iterator[Path]:
        """A temporary file that gets its name at the end and is removed after a failure."""
        target = self.path / name
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            with self._refusals(name, "write"):
                target.parent.mkdir(parents=True, exist_ok=True)
                yield temporary
                sync(temporary)
                temporary.replace(target)
                sync(target.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    @contextmanager
    def _refusals(self, name: str, what: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as failure:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(self.path / name)) from failure
        except OSError as failure:
            reason = failure.strerror or failure
            step = "free some space" if failure.errno in (errno.ENOSPC, errno.EDQUOT) else "check its permissions"
            raise StorageError(f"{self.path / name}: cannot {what}, {reason}", hint=step) from failure


def sync(path: Path) -> None:
    """Make sure that a file's bytes, or a directory's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_directory(path: Path, error: type[BrimError]) -> int:
    """Lock a directory against other writers until the returned handle is closed or the process ends."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as failure:
        os.close(handle)
        raise error(
            f"{path} is being written by another process", code="in_use", hint="wait for it to end"
        ) from failure
    except OSError:
        pass  # a file system without locks, such as some NFS: continue without
    return handle


def _local_path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigError(f"{url} is no path of this machine", hint="write file:///absolute/path")
    return Path(unquote(parts.path))


# Object stores


class ObjectPlace(Place):
    """A prefix in an object store, through fsspec."""

    path = None

    def __init__(self, url: str, answered: bool = False, patience_s: float | None = None) -> None:
        """answered: the store has answered before, so a silent one is retried longer; patience_s: how long instead."""
        scheme, _, rest = url.partition("://")
        if "@" in rest.partition("/")[0]:
            hint = "put them in the environment, for S3 as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise ConfigError(f"{_tidy(url)}: credentials do not belong in a URL", hint=hint)
        self.url = f"{scheme.lower()}://{rest.strip('/')}"
        if not rest.strip("/"):
            raise ConfigError(f"{url} names no bucket", hint=f"write {scheme}://bucket/prefix")
        self.name = self.url.rpartition("/")[2]
        self.answered, self.patience_s = answered, patience_s
        self._gave_up = False  # after giving up once, do not wait again until the store answers
        self._told = False
        self._opened: Any = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectPlace, (self.url, self.answered, self.patience_s)

    def __str__(self) -> str:
        return self.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPlace) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def read_bytes(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """One request; a large range is fetched in parallel parts."""
        if stop is not None and stop <= start:
            return b""
        return self._ask("read", name, lambda fs: _fetch(fs, self.at(name), start, stop))

    def size(self, name: str) -> int:
        info = self._ask("read", name, lambda fs: fs.info(self.at(name)))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "no such object", self.at(name))
        return int(info["size"])

    def sizes(self, under: str = "") -> dict[str, int]:
        top = self.at(under) if under else self.url
        try:
            entries = self._ask("list", under, lambda fs: fs.ls(top, detail=True))
        except FileNotFoundError:
            return {}
        own = top.partition("://")[2] + "/"
        files = {str(entry["name"]).lstrip("/"): int(entry["size"]) for entry in entries if entry["type"] == "file"}
        return {name.removeprefix(own): size for name, size in files.items() if name.startswith(own) and name != own}

    def walk(self) -> list[str]:
        own = self.url.partition("://")[2] + "/"
        paths = self._ask("list", "", lambda fs: fs.find(self.url))
        names = (str(name).lstrip("/") for name in paths)
        return sorted(name.removeprefix(own) for name in names if name.startswith(own) and not name.endswith("/"))

    def put_file(self, local: Path, name: str) -> None:
        """Upload; in parts that become one object at the end where it is large."""
        limits = _upload_limits(local.stat().st_size)
        self._ask("write", name, lambda fs: fs.put_file(str(local), self.at(name), **limits(fs)))

    def put_bytes(self, data: bytes, name: str) -> None:
        limits = _upload_limits(len(data))
        self._ask("write", name, lambda fs: fs.pipe_file(self.at(name), data, **limits(fs)))

    def create(self, data: bytes, name: str) -> bool:
        """Write an object that must not exist yet; returns whether it was created, decided by the store atomically."""
        limits = _upload_limits(len(data))
        try:
            self._ask("write", name, lambda fs: fs.pipe_file(self.at(name), data, mode="create", **limits(fs)))
        except FileExistsError:  # perhaps by our own attempt, whose answer was lost
            with suppress(FileNotFoundError):
                return self.read_bytes(name) == data
            return False
        return True

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask("remove", name, lambda fs: fs.rm_file(self.at(name)))

    # Asking

    def _ask(self, what: str, name: str, request: Callable[[Any], _Result]) -> _Result:
        """Send one request, and repeat it while the store does not answer."""
        patience_s = self._patience_s()
        deadline, pause_s = time.monotonic() + patience_s, 0.1
        while True:
            try:
                result = request(self._filesystem())
            except (ConfigError, StorageError):
                raise
            except Exception as failure:  # each store's library has exceptions of its own
                reason = _judge(failure, self, what, name)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    self._gave_up = True
                    tried = f", tried for {patience_s:g} s" if patience_s else ""
                    raise StorageError(
                        f"{self} does not answer{tried} ({reason})",
                        code="no_answer",
                        hint="check the network, the store and its endpoint (AWS_ENDPOINT_URL for S3), then continue "
                        "with {resume}",
                    ) from failure
                if pause_s > 0.2:  # one or two failures in a row are not worth a warning
                    self._tell(reason, patience_s)
            else:
                self._heard()
                return result
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 2, 5.0)

    def _patience_s(self) -> float:
        if self._gave_up:
            return 0.0
        if self.patience_s is not None:
            return self.patience_s
        return _retry_s() if self.answered else min(FIRST_S, _retry_s())

    def _tell(self, reason: str, patience_s: float) -> None:
        with self._lock:
            warned, self._told = self._told, True
        if not warned:
            _log.warning("%s does not answer (%s); trying again for up to %g s", self, reason, patience_s)

    def _heard(self) -> None:
        with self._lock:
            warned, self.answered, self._told, self._gave_up = self._told, True, False, False
        if warned:
            _log.info("%s answers again", self)

    def _filesystem(self) -> Any:
        with self._lock:
            if self._opened is None:
                self._opened = _open(self.url.partition("://")[0])
            return self._opened


def _open(scheme: str) -> Any:
    """fsspec's file system for a scheme, without its own retries and caches: only `_ask` retries."""
    try:
        import fsspec
    except ImportError as failure:
        raise ConfigError(f'{scheme}:// URLs need brim[cluster]: pip install "brim[cluster]"') from failure
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        limits = {"connect_timeout": CONNECT_S, "read_timeout": SILENT_S, "retries": {"total_max_attempts": 1}}
        options |= {"config_kwargs": limits}  # endpoint, region and keys are those of the environment
    try:
        opened = fsspec.filesystem(scheme, **options)
    except ValueError as failure:
        raise ConfigError(
            f"{scheme}:// is no kind of URL that is known ({failure})", hint="use s3:// or a path"
        ) from failure
    except ImportError as failure:
        raise ConfigError(f"{scheme}:// URLs need another package: {failure}") from failure
    if hasattr(opened, "retries"):
        opened.retries = 1
    return opened


def _upload_limits(num_bytes: int) -> Callable[[Any], dict[str, float]]:
    """How long an upload may take: before the store answers "100 Continue", the library's own timeouts do not apply."""
    limit_s = SILENT_S + num_bytes / SLOWEST_BYTES_PER_S
    return lambda fs: {"timeout": limit_s} if getattr(fs, "async_impl", False) else {}


def _fetch(fs: Any, key: str, start: int, stop: int | None) -> bytes:
    """A range of bytes, requested in parallel parts where it is large; shorter if the object ends before."""
    if stop is None or stop - start <= PART_BYTES:
        try:
            # always with a range: without one the library requests the size first, and an error of that has no reason
            return bytes(fs.cat_file(key, start=start, end=stop))
        except Exception as failure:
            if _status(failure)[0] == 416:  # it starts after the object's end
                return b""
            raise
    starts = list(range(start, stop, PART_BYTES))
    parts = fs.cat_ranges([key] * len(starts), starts, [*starts[1:], stop], on_error="return")
    for part in parts:
        if isinstance(part, Exception) and _status(part)[0] != 416:
            raise part
    return b"".join(b"" if isinstance(part, Exception) else bytes(part) for part in parts)


def _retry_s() -> float:
    text = os.environ.get("BRIM_STORAGE_RETRY_S", "")
    try:
        return max(0.0, float(text)) if text else RETRY_S
    except ValueError:
        raise ConfigError(
            f"BRIM_STORAGE_RETRY_S={text!r} is not a number of seconds", hint="write one such as 60"
        ) from None


# Failures


_PASSING = {  # names of the libraries' exceptions for failed connections
    *("ConnectionError", "TimeoutError", "HTTPClientError", "ClientConnectionError", "ClientPayloadError"),
    *("IncompleteReadError", "IncompleteRead", "ResponseParserError", "ResponseStreamingError", "FSTimeoutError"),
}
_PASSING_CODES = {"SlowDown", "RequestTimeout", "IncompleteBody", "BadDigest", "OperationAborted"}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}
_BAD_CREDENTIALS = {
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "InvalidClientTokenId")
}
_MAY = "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket"


def _judge(failure: Exception, place: ObjectPlace, what: str, name: str) -> str:
    """The reason, if the request may succeed later; otherwise raises the final error."""
    status, code = _status(failure)
    kinds = {kind.__name__ for link in _chain(failure) for kind in type(link).__mro__}
    reason = _tidy(str(getattr(failure, "strerror", None) or failure)) or type(failure).__name__
    where = place.at(name) if name else str(place)
    if kinds & _NO_CREDENTIALS:
        hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        raise StorageError(f"{where}: no credentials", hint=hint) from failure
    if code in _BAD_CREDENTIALS:
        raise StorageError(
            f"{where}: the store does not accept the credentials ({code})", hint="check them"
        ) from failure
    if code == "NoSuchBucket":
        raise StorageError(f"{where}: there is no such bucket", hint="create it or correct the URL") from failure
    if status == 412 or isinstance(failure, FileExistsError):
        raise FileExistsError(errno.EEXIST, "is there already", where) from failure
    if status in (401, 403) or isinstance(failure, PermissionError):
        hint = f"let these credentials do {_MAY} there, or use others"
        raise StorageError(f"{where}: no permission to {what}", hint=hint) from failure
    if (status >= 500 and status != 501) or status in (408, 409, 429) or code in _PASSING_CODES or kinds & _PASSING:
        return reason
    if isinstance(failure, FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, "no such object", where) from failure
    raise StorageError(f"{where}: cannot {what}, {reason}", hint="check the URL and the store") from failure


def _chain(failure: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while failure is not None and id(failure) not in seen:
        seen.add(id(failure))
        yield failure
        failure = failure.__cause__ or failure.__context__


def _status(failure: BaseException) -> tuple[int, str]:
    """HTTP status and the store's own code; 0 and "" if there was no answer."""
    for link in _chain(failure):
        answer = getattr(link, "response", None)
        if isinstance(answer, dict):
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status), str(answer.get("Error", {}).get("Code", ""))
    return 0, ""


def _tidy(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//…@", " ".join(text.split()))
