"""What a service is started with: chosen once by `brim serve`, handed to its children as JSON on standard input.

Never in arguments or the environment of a child: the token and a database password are in it. Standard library only,
so that the supervisor and the command line can import it.
"""

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from brim.errors import ConfigError
from brim.jobs.worker.process import urls

DEFAULT_DATA = "brim-data"  # beside where the service is started; BRIM_DATA names another
FOLDERS = ("datasets", "runs", "results", "jobs", "uploads", "trash", "workers")
DASHBOARD = "brim-dashboard"  # as it names itself to the API, which does not log what pages ask for each second
MIB = 1024**2
MAX_PREDICT_MEMORY = 90  # percent: jobs are left something
_POSITIVE = (
    "hang_s", "max_unfinished", "max_watchers", "max_body_bytes", "max_upload_bytes", "predictors",
    "predict_deadline_ms", "predict_hang_s", "max_predict_bytes", "max_predict_pixels", "max_predict_files",
    "max_predicting",
)  # fmt: skip
_POSTGRES = re.compile(r"postgres(ql)?(\+\w+)?$")
_TILES = re.compile(r"https?://[A-Za-z0-9.\-]+(:\d+)?/[^\s;,\"\'<>]*\{z\}[^\s;,\"\'<>]*$")
_CLUSTER = re.compile(r"auto|ray://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]@]+)(:[0-9]{1,5})?/?")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A running service's choices; `data` is absolute."""

    data: Path
    token: str = field(default="", repr=False)  # made or read by the supervisor before any child starts
    host: str = "127.0.0.1"
    port: int = 8000
    database: str | None = field(default=None, repr=False)  # PostgreSQL's URL, password and all; None: files in data
    workers: int = 1
    allow_hosts: tuple[str, ...] = ()  # names besides our own that a proxy or container is reached by
    hang_s: float = 300.0  # a worker silent for longer is killed
    min_free_bytes: int = 512 * MIB  # disk that jobs leave alone
    max_unfinished: int = 1000  # jobs that may wait or run at once
    max_watchers: int = 200  # event streams at once
    max_body_bytes: int = MIB  # of a JSON body
    max_upload_bytes: int = 2048 * MIB  # of one multipart request
    max_upload_files: int = 10_000
    api_processes: int = 1  # on the one listening socket
    dashboard: bool = False  # pages in the browser, by a process of their own; `brim serve` turns them on
    tile_url: str = ""  # of map tiles, as Leaflet has them; without it no map asks anybody for anything
    predictors: int = 1  # prediction processes: one per GPU, or one on the CPU
    predict_memory: float = 20.0  # percent of each device that is kept from jobs for prediction; 0 turns it off
    predict_deadline_ms: int = 30_000  # of a request that names none
    predict_hang_s: float = 10.0  # a forward may take as long, or 20 times what is expected of it
    max_predict_bytes: int = 64 * MIB  # of one file
    max_predict_pixels: int = 2**26  # of one image
    max_predict_files: int = 100  # of one request
    max_predicting: int = 2000  # requests under way in one API process
    gpus: tuple[str, ...] = ()  # of this machine, as CUDA names them; workers have one each
    cluster: str | None = None  # Ray's address for jobs that ask for the cluster; no request can name another
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if not self.data.is_absolute():
            raise ConfigError(f'data="{self.data}" must be an absolute path')
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} must be between 0 and 65535; 0 takes any free one")
        if self.workers < 1:
            raise ConfigError(f"workers={self.workers} must be at least 1")
        for name in self.allow_hosts:
            if not _is_host(name):
                raise ConfigError(f'host "{name}" must be a name or an address without scheme, port or path')
        if self.api_processes < 1:
            raise ConfigError(f"--api-processes {self.api_processes} must be at least 1")
        if not 0 <= self.predict_memory <= MAX_PREDICT_MEMORY:
            raise ConfigError(
                f"--predict-memory {self.predict_memory:g} must be between 0 and {MAX_PREDICT_MEMORY} percent; "
                "0 turns prediction off"
            )
        if self.tile_url and not _TILES.match(self.tile_url):
            raise ConfigError(
                f'BRIM_TILE_URL="{self.tile_url}" must be like https://tiles.example.org/{{z}}/{{x}}/{{y}}.png'
            )
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        if self.cluster is not None and not _CLUSTER.fullmatch(self.cluster):
            raise ConfigError(f'--cluster "{self.cluster}" is no address; use auto or ray://HOST:PORT')
        _check_database(self.database)

    @property
    def jobs_url(self) -> str:
        """Database of the durable queue."""
        return urls(self.data, self.database)[0]

    @property
    def catalogue_url(self) -> str:
        """Database of the catalogue: its own file, or the same PostgreSQL."""
        return urls(self.data, self.database)[1]

    @property
    def token_file(self) -> Path:
        """Where the token lies, mode 0600."""
        return self.data / "token"

    @property
    def batch_sizes(self) -> Path:
        """The file of tuned batch sizes."""
        return self.data / "batch_sizes.json"

    @property
    def predict_sockets(self) -> tuple[Path, ...]:
        """Where prediction processes listen; none where prediction is turned off."""
        return tuple(self.data / f"predict-{index}.sock" for index in range(self.predictors * self.predicts))

    @property
    def dashboard_socket(self) -> Path:
        """Where the dashboard listens, for the API alone."""
        return self.data / "dashboard.sock"

    @property
    def predicts(self) -> bool:
        """Whether the service predicts over HTTP at all."""
        return self.predict_memory > 0

    @property
    def metrics_folder(self) -> Path:
        """Where several API processes keep their counters, to be summed; emptied at each start."""
        return self.data / "metrics"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> frozenset[str]:
        """Names a request's Host may have, lower case and without port; IPv6 addresses in brackets."""
        own = {"localhost", "127.0.0.1", "[::1]"}
        if self.host not in ("0.0.0.0", "::", "[::]", ""):  # any address: not a name to be called by
            own.add(_in_brackets(self.host))
        return frozenset(name.lower() for name in own | {_in_brackets(name) for name in self.allow_hosts})

    @property
    def url(self) -> str:
        """Where a person on this machine finds the service; the wildcard is shown as loopback."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "[::]", "") else _in_brackets(self.host)
        return f"http://{host}:{self.port}"

    @property
    def entry_url(self) -> str:
        """The ready-to-click address with the token."""
        return f"{self.url}/?token={quote(self.token, safe='')}"

    def make_folders(self) -> None:
        """DATA and what lies in it, for the owner alone."""
        self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in FOLDERS:
            (self.data / name).mkdir(exist_ok=True, mode=0o700)

    def to_json(self) -> str:
        """For a child's standard input."""
        return json.dumps({**asdict(self), "data": str(self.data)})

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """What `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("allow_hosts", "gpus")}
        return cls(**{**values, **lists, "data": Path(values["data"])})


def from_options(
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    database: str | None = None,
    data: Path | None = None,
    workers: int = 1,
    allow_hosts: tuple[str, ...] = (),
    api_processes: int = 1,
    predictors: int = 1,
    predict_memory: float = 20.0,
    dashboard: bool = False,
    gpus: tuple[str, ...] = (),
    cluster: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Settings of a command line and its environment, without the token: `token.ensure` makes that.

    BRIM_DATA, BRIM_DATABASE and BRIM_CLUSTER stand in for absent options; BRIM_HANG_S, BRIM_MIN_FREE_BYTES,
    BRIM_MAX_UNFINISHED, BRIM_MAX_WATCHERS, BRIM_MAX_UPLOAD_BYTES, BRIM_PREDICT_DEADLINE_MS, BRIM_PREDICT_HANG_S,
    BRIM_MAX_PREDICT_BYTES, BRIM_MAX_PREDICT_PIXELS, BRIM_MAX_PREDICT_FILES, BRIM_MAX_PREDICTING, BRIM_TILE_URL and
    BRIM_LOG_LEVEL set what has no option.
    """
    others: dict[str, Any] = {name: _number(environ, name) for name in _NUMBERS if environ.get(f"BRIM_{name.upper()}")}
    if environ.get("BRIM_LOG_LEVEL"):
        others["log_level"] = environ["BRIM_LOG_LEVEL"].upper()
    return Settings(
        data=data_folder(data, environ),
        host=host,
        port=port,
        database=database or environ.get("BRIM_DATABASE") or None,
        workers=workers,
        allow_hosts=allow_hosts,
        api_processes=api_processes,
        predictors=predictors,
        predict_memory=predict_memory,
        dashboard=dashboard,
        gpus=gpus,
        cluster=cluster or environ.get("BRIM_CLUSTER") or None,
        tile_url=environ.get("BRIM_TILE_URL", ""),
        **others,
    )


def data_folder(data: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The data directory, absolute: as given, or BRIM_DATA, or brim-data here."""
    return Path(data or environ.get("BRIM_DATA") or DEFAULT_DATA).expanduser().resolve()


_NUMBERS = (
    "hang_s", "min_free_bytes", "max_unfinished", "max_watchers", "max_upload_bytes", "predict_deadline_ms",
    "predict_hang_s", "max_predict_bytes", "max_predict_pixels", "max_predict_files", "max_predicting",
)  # fmt: skip


def _number(environ: Mapping[str, str], name: str) -> float | int:
    text = environ[f"BRIM_{name.upper()}"]
    whole = {entry.name: entry.type for entry in fields(Settings)}[name] is int
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise ConfigError(f'BRIM_{name.upper()}="{text}" must be {"a whole number" if whole else "a number"}') from None


def _check_database(url: str | None) -> None:
    """Say what is wrong without the URL itself: it may hold a password."""
    if url is None:
        return
    scheme = url.partition(":")[0]
    if url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        return
    if not (_POSTGRES.match(scheme) and url.startswith(f"{scheme}://")):
        raise ConfigError(
            "--database must be like postgresql://USER:PASSWORD@HOST/NAME; without it, SQLite files in --data are used"
        )
    try:
        parts = urlsplit(url)
        named = bool(parts.path.strip("/")) and (parts.port or 1) > 0
    except ValueError:
        named = False
    if not named:
        raise ConfigError("--database must name a database, as in postgresql://USER:PASSWORD@HOST:5432/NAME")


def _is_host(name: str) -> bool:
    if _HOST_NAME.match(name):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _in_brackets(host: str) -> str:
    return f"[{host.strip('[]')}]" if ":" in host else host
