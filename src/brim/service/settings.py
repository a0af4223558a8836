"""What a service is started with: chosen once by `brim serve`, handed to its processes as JSON on standard input.

Never in arguments or the environment of a process, since it holds the token and a database password. Standard library
only, so that the supervisor and the command line can import it.
"""

import ipaddress
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from brim import loggers
from brim.config import Doc, Range, Unit, check
from brim.errors import ConfigError
from brim.jobs.worker.process import urls

DEFAULT_DATA = "brim-data"  # in the current directory; BRIM_DATA names another
FOLDERS = ("datasets", "runs", "results", "jobs", "uploads", "trash", "workers")
DASHBOARD = "brim-dashboard"  # the dashboard's User-Agent: the API does not log what pages poll every second
COOKIE = "brim_session"  # a cookie's name begins with it: a browser sends those of a host to all of its ports
SESSION = "x-brim-session"  # from the API to the dashboard: in whose name a page asks
ACTOR = "x-brim-actor"  # and who that is, with name and role
MIB = 1024**2
_POSTGRES = re.compile(r"postgres(ql)?(\+\w+)?$")
_TILES = re.compile(r"https?://[A-Za-z0-9.\-]+(:\d+)?/[^\s;,\"\'<>]*\{z\}[^\s;,\"\'<>]*$")
_CLUSTER = re.compile(r"auto|ray://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]@]+)(:[0-9]{1,5})?/?")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?$")
ROLES = ("viewer", "operator", "administrator")  # each may what the ones before it may
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
    head_s: Annotated[float, _POSITIVE, Unit("s"), Doc("Time for the head of a request to arrive.")] = 10.0
    max_waiting: Annotated[
        int, _POSITIVE, Doc("Connections of one address without a request; beyond it, the oldest is closed.")
    ] = 1024
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
    max_predict_deadline_ms: Annotated[
        int, _POSITIVE, Unit("ms"), Doc("Longest deadline: a request that names more gets this.")
    ] = 30_000
    max_predict_late_ms: Annotated[
        int, Range(0), Unit("ms"), Doc("An idle device does not try a request that would be later than this.")
    ] = 1000
    max_predict_part_s: Annotated[
        float, _POSITIVE, Unit("s"), Doc("Longest expected time of work that cannot be divided, as of a sequence.")
    ] = 30.0
    predict_hang_s: Annotated[
        float, _POSITIVE, Unit("s"), Doc("A forward pass may take as long, or 20 times its expected time.")
    ] = 10.0
    max_predict_bytes: Annotated[int, _POSITIVE, Doc("Largest file of a prediction request.")] = 64 * MIB
    max_held_bytes: Annotated[int, _POSITIVE, Doc("Bytes of all prediction requests in one API process.")] = 1024 * MIB
    max_predict_pixels: Annotated[int, _POSITIVE, Doc("Most pixels of an image.")] = 2**26
    max_predict_files: Annotated[int, _POSITIVE, Doc("Most files of one request.")] = 100
    max_predicting: Annotated[int, _POSITIVE, Doc("Prediction requests in progress in one API process.")] = 2000
    gpus: Annotated[tuple[str, ...], Doc("GPUs of this machine as CUDA names them; workers have one each.")] = ()
    cluster: Annotated[str | None, Doc("Ray's address for jobs that want the cluster.")] = None
    oidc_issuer: Annotated[str, Doc("OpenID Connect provider that people may sign in at.")] = ""
    oidc_client_id: Annotated[str, Doc("Name of this service at the provider.")] = ""
    oidc_client_secret: Annotated[str, Doc("Its secret there, if it has one.")] = field(default="", repr=False)
    oidc_roles: Annotated[str, Doc("Who gets which role, like ann@lab.org=operator, *@lab.org=viewer.")] = ""
    oidc_claim: Annotated[str, Doc("Claim of the ID token that names a person.")] = "email"
    public_url: Annotated[str, Doc("Address that browsers reach the service by, where a proxy changes it.")] = ""
    prepared: Annotated[
        int,
        Range(0, 1),
        Doc("1: workers and predictors are forked from a process that has imported torch; 0: each imports it."),
    ] = 1
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
        _check_sign_in(self)

    @property
    def jobs_url(self) -> str:
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
        """Create DATA, its folders and the files of SQLite databases, for the owner alone."""
        self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in FOLDERS:
            (self.data / name).mkdir(exist_ok=True, mode=0o700)
        for url in (self.jobs_url, self.catalogue_url):
            if url.startswith("sqlite:"):
                file = Path(url.removeprefix("sqlite:///"))
                file.touch(mode=0o600)  # SQLite would let everybody read it
                for part in (file, *file.parent.glob(f"{file.name}-*")):  # of an earlier version, with its journals
                    with suppress(PermissionError):
                        part.chmod(0o600)

    def discard_uploads(self) -> None:
        """Remove the folders of uploads and exports whose process was killed."""
        for folder in (self.data / "uploads").glob("[0-9a-f]" * 32):
            shutil.rmtree(folder, ignore_errors=True)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "data": str(self.data)})

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        values: dict[str, Any] = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("allow_hosts", "gpus")}
        return cls(**{**values, **lists, "data": Path(values["data"])})


def from_options(*, data: Path | None = None, environ: Mapping[str, str] = os.environ, **options: Any) -> Settings:
    """Settings from command-line options and the environment, without the token: `token.ensure` makes that.

    BRIM_DATA, BRIM_DATABASE and BRIM_CLUSTER replace absent options; BRIM_LOG_LEVEL and each text and number without an
    option, such as BRIM_TILE_URL and BRIM_PREDICT_DEADLINE_MS, set what has no option. BRIM_LOGGERS, where trainings of
    jobs also log, is checked here and read by the workers.
    """
    loggers.check(loggers.parse(environ.get(loggers.SETTING, "")))
    for name in _NUMBERS:
        if environ.get(f"BRIM_{name.upper()}"):
            options[name] = _number(environ, name)
    options |= {name: text for name in _TEXTS if (text := environ.get(f"BRIM_{name.upper()}", "").strip())}
    for name in ("database", "cluster"):
        options[name] = options.get(name) or environ.get(f"BRIM_{name.upper()}") or None
    if environ.get("BRIM_LOG_LEVEL"):
        options["log_level"] = environ["BRIM_LOG_LEVEL"].upper()
    return Settings(data=data_folder(data, environ), **options)


def open_to_others(data: Path) -> str | None:
    """What is wrong with the permissions of a data directory that other users can read; None if it is private."""
    try:
        mode = data.stat().st_mode & 0o777
    except OSError:  # there is none yet
        return None
    return f"{data} can be read by other users (mode {mode:03o})" if mode & 0o077 else None


def data_folder(data: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The data directory, absolute: as given, or BRIM_DATA, or brim-data in the current directory."""
    return Path(data or environ.get("BRIM_DATA") or DEFAULT_DATA).expanduser().resolve()


_TEXTS = (
    "tile_url", "oidc_issuer", "oidc_client_id", "oidc_client_secret", "oidc_roles", "oidc_claim", "public_url",
)  # fmt: skip
_NUMBERS = (
    "hang_s", "min_free_bytes", "max_unfinished", "max_watchers", "head_s", "max_waiting", "max_upload_bytes",
    "predict_deadline_ms", "max_predict_deadline_ms", "max_predict_late_ms", "max_predict_part_s", "predict_hang_s",
    "max_predict_bytes", "max_held_bytes", "max_predict_pixels", "max_predict_files", "max_predicting", "prepared",
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


def role_patterns(text: str) -> list[tuple[str, str]]:
    """Who has which role, of "*@lab.org=viewer, ann@lab.org=operator"; the most exact pattern comes first."""
    patterns = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        pattern, _, role = (piece.strip() for piece in part.rpartition("="))
        if not pattern or role not in ROLES:
            raise ConfigError(
                f'"{part}" must be NAME=ROLE with one of {", ".join(ROLES)}, like *@lab.org=viewer', field="oidc_roles"
            )
        patterns.append((pattern, role))
    return sorted(patterns, key=lambda each: ("*" in each[0], -len(each[0])))


def _check_sign_in(settings: Settings) -> None:
    for name in ("oidc_issuer", "public_url"):
        text = getattr(settings, name)
        if text and not _is_safe_address(text):
            expected = "must be an address like https://login.lab.org; http only on this machine"
            raise ConfigError(expected, field=name, value=text)
    roles = role_patterns(settings.oidc_roles)
    if settings.oidc_issuer and not (settings.oidc_client_id and roles):
        missing = "oidc_client_id" if not settings.oidc_client_id else "oidc_roles"
        text = "is missing, which a provider to sign in at needs"
        raise ConfigError(text, field=missing, value="", hint="docs/service.md has an example")


def _is_safe_address(text: str) -> bool:
    parts = urlsplit(text)
    is_local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    return bool(parts.hostname) and parts.scheme in ("https", *(["http"] if is_local else [])) and not parts.query


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
