"""The body of a request becomes a Spec: what a job is to do, with every default filled in.

Three forms, told apart by their keys:

    {"dataset_name", "num_samples", "dataset_type", "config"}   a dataset of radio samples
    {"job_name", "config": {"dataset_ids", …}}                  a locator trained on them
    {"kind", "name", "config"}                                  any kind

Where it runs, "devices" and "cluster", may stand beside config or in it. No field of any of them is a path.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter, create_model

from brim.errors import ConfigError, Conflict
from brim.jobs.kinds.fields import Fields, Text, dotted, given, read, unknown
from brim.jobs.kinds.meanings import explained
from brim.jobs.kinds.registry import KINDS, Kind

__all__ = ["Spec", "body_schema", "config_schema", "read_body"]

_TOLD_APART = "give kind, or dataset_name and num_samples, or job_name and config.dataset_ids"
_MOVED = ("num_samples", "dataset_type")  # beside config in a generation request, inside it otherwise
_EITHER = ("devices", "cluster")  # beside config or inside it


@dataclass(frozen=True, slots=True)
class Spec:
    """What a job is to do; config is resolved and JSON-able."""

    kind: str
    name: str
    config: dict[str, Any]

    @property
    def dataset_ids(self) -> tuple[str, ...]:
        """Datasets it reads."""
        return tuple(self.config.get("dataset_ids", ()))

    @property
    def run_id(self) -> str | None:
        """The run it reads."""
        found = self.config.get("run_id")
        return None if found is None else str(found)


def read_body(body: Mapping[str, Any]) -> Spec:
    """The job that a request asks for; what cannot be is a ConfigError with the field's name as the request has it."""
    if not isinstance(body, Mapping):
        raise ConfigError(f"the body must be an object; {_TOLD_APART}", field="")
    if "kind" in body:
        return _read_explicit(body)
    if "dataset_name" in body or "num_samples" in body:
        return _read_generation(body)
    config = body.get("config")
    if "job_name" in body or (isinstance(config, Mapping) and "dataset_ids" in config):
        values = given(read(_training_form(), body))
        return _resolved(KINDS["rf.train"], values["job_name"], _config(values))
    known = sorted({*_generation_form().model_fields, *_training_form().model_fields, "kind", "name"})
    for name in body:
        if name not in known:
            raise ConfigError(unknown(str(name), str(name), known), field=dotted([str(name)]))
    raise ConfigError(f"kind is missing; {_TOLD_APART}", field="kind")


def body_schema() -> dict[str, Any]:
    """JSON schema of a body, complete in itself."""
    short = {"rf.generate": _generation_form(), "rf.train": _training_form()}
    forms = [*short.items(), *((name, _explicit_form(name)) for name in KINDS)]
    return {"oneOf": [_form_schema(name, form) for name, form in forms]}


def config_schema(name: str) -> dict[str, Any]:
    """JSON schema of the config of a kind, complete in itself, with every default and what each field means."""
    model = KINDS[name].model
    schema = explained(name, _inlined(model.model_json_schema()))
    for field, info in model.model_fields.items():
        if not info.is_required():  # pydantic leaves out those that a function makes
            default = info.get_default(call_default_factory=True)
            schema["properties"][field].setdefault("default", TypeAdapter(Any).dump_python(default, mode="json"))
    return schema


def _form_schema(name: str, form: type[Fields]) -> dict[str, Any]:
    schema = explained(name, _inlined(form.model_json_schema()))
    schema["properties"]["config"] = explained(name, schema["properties"]["config"])
    return schema


# Forms


@cache
def _generation_form() -> type[Fields]:
    config = KINDS["rf.generate"].model
    kept = {name: (info.annotation, info) for name, info in config.model_fields.items() if name != "num_samples"}
    inner: type[Fields] = create_model("GenerationConfig", __base__=Fields, **kept)  # type: ignore[call-overload]
    outer = {name: (info.annotation, info) for name, info in config.model_fields.items() if name in _MOVED}
    form: type[Fields] = create_model(  # type: ignore[call-overload]
        "GenerationRequest", __base__=Fields, dataset_name=(Text, ...), config=(inner, {}), **outer, **_beside(config)
    )
    return form


@cache
def _training_form() -> type[Fields]:
    config = KINDS["rf.train"].model
    form: type[Fields] = create_model(
        "TrainingRequest", __base__=Fields, job_name=(Text, ...), config=(config, ...), **_beside(config)
    )
    return form


@cache
def _explicit_form(name: str) -> type[Fields]:
    title = "".join(part.capitalize() for part in name.split("."))
    model = KINDS[name].model
    needed = any(info.is_required() for info in model.model_fields.values())
    own: dict[str, Any] = {
        "kind": (Literal[(name,)], ...),
        "name": (Text, ...),
        "config": (model, ... if needed else {}),
        **_beside(model),
    }
    form: type[Fields] = create_model(f"{title}Request", __base__=Fields, **own)
    return form


def _beside(model: type[Fields]) -> dict[str, Any]:
    return {name: (info.annotation, info) for name, info in model.model_fields.items() if name in _EITHER}


# Reading


def _read_explicit(body: Mapping[str, Any]) -> Spec:
    name = body["kind"]
    if not isinstance(name, str) or name not in KINDS:
        raise ConfigError(unknown(f"kind={name!r}", str(name), list(KINDS)), field="kind")
    values = given(read(_explicit_form(name), body))
    return _resolved(KINDS[name], values["name"], _config(values))


def _config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a form, with what stands beside it and may."""
    config = dict(values.get("config", {}))
    for name in _EITHER:
        if name in values and config.setdefault(name, values[name]) != values[name]:
            raise Conflict(
                f"{name}={values[name]!r} and config.{name}={config[name]!r} differ; give one of them", field=name
            )
    return config


def _read_generation(body: Mapping[str, Any]) -> Spec:
    values = given(read(_generation_form(), body))
    config = _config(values)
    outer = {name: values[name] for name in _MOVED if name in values}
    if config.get("dataset_type", outer.get("dataset_type")) != outer.get("dataset_type", config.get("dataset_type")):
        raise Conflict(
            f"dataset_type={outer['dataset_type']!r} and config.dataset_type={config['dataset_type']!r} differ; "
            "give one of them",
            field="dataset_type",
        )
    try:
        return _resolved(KINDS["rf.generate"], values["dataset_name"], {**config, **outer})
    except (ConfigError, Conflict) as failure:
        name = (failure.field or "").removeprefix("config.")
        if name not in outer or name in config:
            raise
        raise type(failure)(str(failure).replace(failure.field or "", name, 1), field=name) from failure


def _resolved(kind: Kind, name: str, values: Mapping[str, Any]) -> Spec:
    ids = values.get("dataset_ids", [])
    for at, one in enumerate(ids):
        if one in ids[:at]:
            raise ConfigError(
                f"config.dataset_ids[{at}] repeats {one}; give it once", field=f"config.dataset_ids[{at}]"
            )
    return Spec(kind.name, name.strip(), kind.resolve(values))


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its definitions in their places: an OpenAPI document has no room for them elsewhere."""
    definitions = schema.pop("$defs", {})

    def fill(part: Any) -> Any:
        if isinstance(part, list):
            return [fill(one) for one in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            target = definitions[part["$ref"].rpartition("/")[2]]
            return fill({**target, **{key: value for key, value in part.items() if key != "$ref"}})
        return {key: fill(value) for key, value in part.items()}

    return dict(fill(schema))
