"""The body of a request becomes a Spec: what a job is to do, with every default filled in.

Three forms, told apart by their keys:

    {"dataset_name", "num_samples", "dataset_type", "config"}   a dataset of radio samples
    {"job_name", "config": {"dataset_ids", …}}                  a locator trained on them
    {"kind", "name", "config"}                                  any kind

Where it runs, "devices" and "cluster", may stand beside config or in it. No field of any of them is a path. A wrong
value raises a ConfigError, values that are right by themselves but not together one with code "conflict"; field is the
name as the request has it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from brim.config import Length, check, nearest, raise_all, schema, settings
from brim.errors import BrimError, ConfigError, printable
from brim.jobs.kinds import rf, segment, sequence
from brim.jobs.kinds.kind import MAX_COUNT, MAX_TEXT, Kind
from brim.jobs.status import Spec

KINDS: Final[dict[str, Kind]] = {kind.name: kind for kind in (*rf.KINDS, *segment.KINDS, *sequence.KINDS)}
_FORMS: Final = "give kind, or dataset_name and num_samples, or job_name and config.dataset_ids"
_EITHER: Final = ("devices", "cluster")  # beside config or inside it


@dataclass(frozen=True, slots=True)
class _Text:
    name: Annotated[str, Length(1, MAX_TEXT)]

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BodyForm:
    title: str
    kind: Kind
    name_key: str  # the key of the job's name
    is_explicit: bool = False  # names its kind
    moved: Sequence[str] = ()  # required settings that stand beside config and not in it
    both: Sequence[str] = ()  # further settings that may stand beside config

    @property
    def beside(self) -> list[str]:
        return [*self.moved, *self.both, *(name for name in _EITHER if name in settings(self.kind.config))]

    @property
    def needs_config(self) -> bool:
        required = {name for name, setting in settings(self.kind.config).items() if setting.required}
        return not required <= {*self.moved}

    @property
    def keys(self) -> list[str]:
        return [*(["kind"] if self.is_explicit else []), self.name_key, *self.beside, "config"]

    def read(self, body: Mapping[str, Any]) -> Spec:
        faults: list[BrimError] = [*_unknown(body, self.keys)]
        for key in (self.name_key, *self.moved, *(["config"] if self.needs_config else [])):
            if key not in body:
                faults.append(ConfigError(f"{key} is missing", field=key, code="missing"))
        config, name = body.get("config", {}), ""
        try:
            name = _read_name(body.get(self.name_key, "-"), self.name_key)
            if not isinstance(config, Mapping):
                raise ConfigError("must be an object", field="config", value=config, code="wrong_type")
        except ConfigError as failure:
            faults.append(failure)
        if not isinstance(config, Mapping) or any(fault.code == "missing" for fault in faults):
            raise_all(faults)
        known = [name for name in settings(self.kind.config) if name not in self.moved]
        faults += _unknown({name: 0 for name in config if name in self.moved}, known, "config.")
        outer = {key: body[key] for key in self.beside if key in body}
        for key, value in outer.items():
            if key in config and (config[key] != value or type(config[key]) is not type(value)):  # 0 is not false
                other = f"and config.{key}={printable(str(config[key]), 60)} differ; give one of them"
                raise ConfigError(other, field=key, value=value, code="conflict")
        try:
            resolved = self.kind.resolve({**config, **outer})
        except ConfigError as failure:
            for one in (failure, *failure.more):
                key = (one.field or "").removeprefix("config.")
                if key in outer and key not in config:
                    one.field = key  # as the request has it
            faults += [failure, *failure.more]
        raise_all(faults)
        return Spec(self.kind.name, name.strip(), resolved)

    def schema(self) -> dict[str, Any]:
        config = config_schema(self.kind.name)
        properties = config["properties"]
        inner = {name: part for name, part in properties.items() if name not in self.moved}
        keys: dict[str, Any] = {"kind": {"type": "string", "enum": [self.kind.name]}} if self.is_explicit else {}
        keys[self.name_key] = schema(_Text)["properties"]["name"] | {"title": self.name_key}
        keys |= {name: properties[name] for name in self.beside}
        required = [name for name in config["required"] if name in inner]
        keys["config"] = {**config, "properties": inner, "required": required}
        needed = [*(["kind"] if self.is_explicit else []), self.name_key, *self.moved]
        return {
            "type": "object",
            "title": self.title,
            "properties": keys,
            "required": [*needed, "config"] if self.needs_config else needed,
            "additionalProperties": False,
        }


_GENERATION = _BodyForm(
    title="GenerationRequest",
    kind=KINDS["rf.generate"],
    name_key="dataset_name",
    moved=["num_samples"],
    both=["dataset_type"],
)
_TRAINING = _BodyForm(title="TrainingRequest", kind=KINDS["rf.train"], name_key="job_name")


def read_body(body: Any) -> Spec:
    """The job that a request asks for."""
    if not isinstance(body, Mapping):
        raise ConfigError(f"the body must be an object; {_FORMS}", field="", code="wrong_type")
    if "kind" in body:
        kind = body["kind"]
        if not isinstance(kind, str) or kind not in KINDS:
            message = f"is unknown; {nearest(str(kind), list(KINDS))}"
            raise ConfigError(message, field="kind", value=kind, code="unknown_choice")
        return _explicit(kind).read(body)
    if "dataset_name" in body or "num_samples" in body:
        return _GENERATION.read(body)
    config = body.get("config")
    if "job_name" in body or (isinstance(config, Mapping) and "dataset_ids" in config):
        return _TRAINING.read(body)
    raise_all(_unknown(body, sorted({*_GENERATION.keys, *_TRAINING.keys, "kind", "name"})))
    raise ConfigError(f"kind is missing; {_FORMS}", field="kind", code="missing")


def body_schema() -> dict[str, Any]:
    """JSON schema of a body, complete in itself."""
    return {"oneOf": [form.schema() for form in (_GENERATION, _TRAINING, *map(_explicit, KINDS))]}


def config_schema(name: str) -> dict[str, Any]:
    """JSON schema of the config of a kind, complete in itself, with every default and description."""
    limited: dict[str, Any] = _limited(schema(KINDS[name].config))
    return limited


def _explicit(name: str) -> _BodyForm:
    title = "".join(part.capitalize() for part in name.split("."))
    return _BodyForm(title=f"{title}Request", kind=KINDS[name], name_key="name", is_explicit=True)


def _read_name(value: Any, key: str) -> str:
    try:
        return _Text(value).name
    except ConfigError as failure:
        if failure.code == "wrong_length":
            message = f"{key} has {len(value)} characters; expected 1 to {MAX_TEXT}"
            raise ConfigError(message, field=key, code=failure.code) from failure
        failure.field = key
        raise


def _unknown(values: Mapping[str, Any], known: Sequence[str], path: str = "") -> list[ConfigError]:
    fields = {name: printable(f"{path}{name}") for name in values if name not in known}
    return [
        ConfigError(f"{field} is unknown; {nearest(str(name), known)}", field=field, code="unknown_field")
        for name, field in fields.items()
    ]


def _limited(part: Any) -> Any:
    """The schema with a maximum for every count: see check_counts."""
    if isinstance(part, list):
        return [_limited(one) for one in part]
    if not isinstance(part, dict):
        return part
    limited = {key: value if key in ("default", "enum") else _limited(value) for key, value in part.items()}
    if part.get("type") == "integer" and not part.keys() & {"maximum", "exclusiveMaximum"}:
        limited["maximum"] = MAX_COUNT
    return limited
