"""What a service is started with: chosen once by `brim serve`, handed to its processes as JSON on standard input.

Never in arguments or the environment of a process, since it holds the token and a database password. Standard library
only, so that the supervisor and the command line can import it.
"""

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from brim.config import Doc, Range, Unit, check
from brim.errors import ConfigError
from brim.jobs.worker.process import urls

DEFAULT_DATA = "brim-data"  # in the current directory; BRIM_DATA names another
FOLDERS = ("datasets", "runs", "results", "jobs", "uploads", "trash", "workers")
DASHBOARD = "brim-dashboard"  # the dashboard's User-Agent: the API does not log what pages poll every second
MIB = 1024**2
_POSTGRES = re.compile(r"postgres(ql)?(\+\w+)?$")
_TILES = re.compile(r"https?://[A-Za-z0-9.\-]+(:\d+)?/[^\s;,\"\'<>]*\{z\}[^\s;,\"\'<>]*$")
_CLUSTER = re.compile(r"auto|ray://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]@]+)(:[0-9]{1,5})?/?")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?$")
_POSITIVE = Range(above=0)
_AT_LEAST_ONE = Range(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A running service's settings; `data` is absolute."""

    data: Annotated[Path, Doc("Directory of datasets, runs, results, databases and the token.")]
    token: Annotated[str, Doc("Set by the supervisor before any process starts.")] = field(default="", repr=False)
    host: Annotated[str, Doc("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Range(0, 65535, note="0 takes any free one"), Doc("Port to listen on.")] = 8000
    database: Annotated[str | None, Doc("URL of PostgreSQL; without it, SQLite files in data.")] = field(
        default=None, repr=False
    )
    workers: Annotated[int, _AT_LEAST_ONE, Doc("Worker processes.")] = 1
    allow_hosts: Annotated[tuple[str, ...], Doc("Other names by which a proxy or container is reached.")] = ()
    hang_s: Annotated[float, _POSITIVE, Unit("s"), Doc("A worker silent for longer is killed.")] = 300.0
    min_free_bytes: Annotated[int, Doc("Disk space that jobs leave free.")] = 512 * MIB
    max_unfinished: Annotated[int, _POSITIVE, Doc("Jobs that may be waiting or running.")] = 1000
    max_watchers: Annotated[int, _POSITIVE, Doc("Event streams at once.")] = 200
    max_body_bytes: Annotated[int, _POSITIVE, Doc("Largest JSON body.")] = MIB
    max_upload_bytes: Annotated[int, _POSITIVE, Doc("Largest upload.")] = 2048 * MIB
    max_upload_files: Annotated[int, Doc("Most files of an upload.")] = 10_000
    api_processes: Annotated[int, _AT_LEAST_ONE, Doc("API processes on the one listening socket.")] = 1
    dashboard: Annotated[bool, Doc("Pages in the browser, by a process of their own.")] = False
    tile_url: Annotated[str, Doc("Map tiles, as Leaflet names them; without it, maps make no requests.")] = ""
    predictors: Annotated[int, _POSITIVE, Doc("Prediction processes: one per GPU, or one on the CPU.")] = 1
    predict_memory: Annotated[
        float,
        Range(0, 90, note="0 turns prediction off"),
        Unit("percent"),
        Doc("Share of each device's memory for prediction, kept from jobs."),
    ] = 20.0
    predict_deadline_ms: Annotated[int, _POSITIVE, Unit("ms"), Doc("Deadline of a request that names none.")] = 30_000
    predict_hang_s: Annotated[
        float, _POSITIVE, Unit("s"), Doc("A forward pass may take as long, or 20 times its expected time.")
    ] = 10.0
    max_predict_bytes: Annotated[int, _POSITIVE, Doc("Largest file of a prediction request.")] = 64 * MIB
    max_predict_pixels: Annotated[int, _POSITIVE, Doc("Most pixels of an image.")] = 2**26
    max_predict_files: Annotated[int, _POSITIVE, Doc("Most files of one request.")] = 100
    max_predicting: Annotated[int, _POSITIVE, Doc("Prediction requests in progress in one API process.")] = 2000
    gpus: Annotated[tuple[str, ...], Doc("GPUs of this machine as CUDA names them; workers have one each.")] = ()
    cluster: Annotated[str | None, Doc("Ray's address for jobs that want the cluster.")] = None
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        check(self)
        if not self.data.is_absolute():
            raise ConfigError("must be an absolute path", field="data", value=str(self.data))
        for name in self.allow_hosts:
            if not _is_host(name):
                text = f'host "{name}" must be a name or an address without scheme, port or path'
                raise ConfigError(text, field="allow_hosts")
        if self.tile_url and not _TILES.match(self.tile_url):
            text = "must be like https://tiles.example.org/{z}/{x}/{y}.png"
            raise ConfigError(text, field="tile_url", value=self.tile_url)
        if self.cluster is not None and not _CLUSTER.fullmatch(self.cluster):
            raise ConfigError("is not an address; use auto or ray://HOST:PORT", field="cluster", value=self.cluster)
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
        """The file with the token, mode 0600."""
        return self.data / "token"

    @property
    def batch_sizes(self) -> Path:
        """The file of tuned batch sizes."""
        return self.data / "batch_sizes.json"

    @property
    def predict_sockets(self) -> tuple[Path, ...]:
        """Sockets of the prediction processes; none if prediction is off."""
        return tuple(self.data / f"predict-{index}.sock" for index in range(self.predictors * self.predicts))

    @property
    def dashboard_socket(self) -> Path:
        """Socket of the dashboard, for the API alone."""
        return self.data / "dashboard.sock"

    @property
    def reader_socket(self) -> Path:
        """Socket of the reader process, for the API alone."""
        return self.data / "reader.sock"

    @property
    def predicts(self) -> bool:
        return self.predict_memory > 0

    @property
    def metrics_folder(self) -> Path:
        """Counters of several API processes, to be summed; emptied at each start."""
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
        """Names that a Host header may have, lower case and without port; IPv6 addresses in brackets."""
        own = {"localhost", "127.0.0.1", "[::1]"}
        if self.host not in ("0.0.0.0", "::", "[::]", ""):  # any address: not a name
            own.add(_in_brackets(self.host))
        return frozenset(name.lower() for name in own | {_in_brackets(name) for name in self.allow_hosts})

    @property
    def url(self) -> str:
        """Address of the service for a person on this machine; the wildcard is shown as loopback."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "[::]", "") else _in_brackets(self.host)
        return f"http://{host}:{self.port}"

    @property
    def entry_url(self) -> str:
        """The address with the token, ready to open."""
        return f"{self.url}/?token={quote(self.token, safe='')}"

    def make_folders(self) -> None:
        """Create DATA and its folders, for the owner alone."""
        self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in FOLDERS:
            (self.data / name).mkdir(exist_ok=True, mode=0o700)

    def to_json(self) -> str:
        """For a process's standard input."""
        return json.dumps({**asdict(self), "data": str(self.data)})

    @classmethod
    def from_json(cls, text: str) -> "Settings":
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
    """Settings from command-line options and the environment, without the token: `token.ensure` makes that.

    BRIM_DATA, BRIM_DATABASE and BRIM_CLUSTER replace absent options; BRIM_HANG_S, BRIM_MIN_FREE_BYTES,
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
    """The data directory, absolute: as given, or BRIM_DATA, or brim-data in the current directory."""
    return Path(data or environ.get("BRIM_DATA") or DEFAULT_DATA).expanduser().resolve()


_NUMBERS = (
    "hang_s", "min_free_bytes", "max_unfinished", "max_watchers", "max_upload_bytes", "predict_deadline_ms",
    "predict_hang_s", "max_predict_bytes", "max_predict_pixels", "max_predict_files", "max_predicting",
)  # fmt: skip


def _number(environ: Mapping[str, str], name: str) -> float | int:
    text = environ[f"BRIM_{name.upper()}"]
    is_whole = isinstance(next(entry.default for entry in fields(Settings) if entry.name == name), int)
    try:
        return int(text) if is_whole else float(text)
    except ValueError:
        expected = "a whole number" if is_whole else "a number"
        raise ConfigError(f'BRIM_{name.upper()}="{text}" must be {expected}', field=name) from None


def _check_database(url: str | None) -> None:
    """The error does not repeat the URL, which may hold a password."""
    if url is None:
        return
    scheme = url.partition(":")[0]
    if url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        return
    if not (_POSTGRES.match(scheme) and url.startswith(f"{scheme}://")):
        raise ConfigError(
            "the database's URL must be like postgresql://USER:PASSWORD@HOST/NAME",
            field="database",
            hint="without {database}, SQLite files in {data} are used",
        )
    try:
        parts = urlsplit(url)
        named = bool(parts.path.strip("/")) and (parts.port or 1) > 0
    except ValueError:
        named = False
    if not named:
        text = "the URL must name a database, as in postgresql://USER:PASSWORD@HOST:5432/NAME"
        raise ConfigError(text, field="database")


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
