"""Every setting of brim refuses what lies outside its declaration, and accepts its ends, wherever it can be given.

The values are made from the declarations: just below and above a range, off its steps, not finite, of another type, an
unknown name, too many items. They go to the class itself, to `read`, to the request of a job and its schema, and to the
command line. A rule between settings has a test of its own where its workload is tested.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_origin

import jsonschema
import pytest
import typer

import brim
from brim.cli import app, main
from brim.config import Range, Setting, read, settings
from brim.engine.config import ModuleTraining
from brim.errors import ConfigError
from brim.jobs.kinds import KINDS, config_schema, read_body
from brim.rf.config import GenerateConfig, LocatorTraining
from brim.rf.measurement.config import MeasureConfig
from brim.segmentation.config import FilesConfig, SampleConfig, SegmentTrainConfig, TuneConfig
from brim.sequences.config import SequenceSample, SequenceTraining, SourceConfig

ROOT = Path(__file__).parents[2]
COMMANDS = {  # whose options are settings, with what else they need
    "train": (ModuleTraining, ["network.py:make", "--data", "rows"]),
    "rf generate": (GenerateConfig, []),
    "rf measure": (MeasureConfig, ["a.wav"]),
    "rf train": (LocatorTraining, ["data"]),
    "segment tune": (TuneConfig, []),
    "segment predict": (FilesConfig, ["images"]),
    "segment train": (SegmentTrainConfig, ["--images", "images", "--masks", "masks", "--model", "unet_tiny"]),
    "segment sample": (SampleConfig, []),
    "sequence sample": (SequenceSample, []),
    "sequence pack": (SourceConfig, ["folder"]),
    "sequence train": (SequenceTraining, ["corpus"]),
}
REQUESTS = ("brim.jobs.kinds", "brim.service.api", "brim.service.prediction")  # their schemas describe them
MUST_HAVE = {"model": "unet_tiny", "dim": 8, "data": Path.cwd()}  # required, and not just any value will do


def declaring() -> list[type]:
    """Every class of settings, wherever it stands."""
    root = Path(brim.__file__).parent
    files = [path for path in sorted(root.rglob("*.py")) if re.search(r"\bDoc\(\s*[\"f]", path.read_text())]
    classes: dict[type, None] = {}
    for path in files:
        module = import_module(".".join(["brim", *path.relative_to(root).with_suffix("").parts]))
        for value in vars(module).values():
            if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.__name__:
                classes |= {value: None} if any(one.doc for one in settings(value).values()) else {}
    return list(classes)


CLASSES = declaring()
CHECKED = [config for config in CLASSES if hasattr(config, "__post_init__")]
EACH = [pytest.param(config, setting, id=f"{config.__name__}-{name}")
        for config in CLASSES for name, setting in settings(config).items()]  # fmt: skip


def outside(setting: Setting) -> Iterator[tuple[Any, str, str]]:
    """Values that a setting must refuse, each with the end of the field's name and the code of its error."""
    if setting.item is not None:
        yield 3, "", "wrong_type"
        yield from (([value], f"[0]{where}", code) for value, where, code in outside(setting.item) if value is not None)
        yield from ((value, "", "wrong_length") for value in lengths(setting, [some(setting.item)]))
    elif setting.group is not None:
        yield from ((3, "", "wrong_type"), ([], "", "wrong_type"))  # its settings are those of a class of its own
    elif setting.types == (bool,):
        yield from (("yes", "", "wrong_type"), (1, "", "wrong_type"))
    else:
        yield True, "", "unknown_choice" if setting.choices and not setting.types else "wrong_type"
        yield from ((value, "", "out_of_range") for value in beyond(setting))
        yield from ((value, "", "wrong_length") for value in lengths(setting, "a"))
        yield from ((value, "", "unprintable") for value in ("a\0b", "   ", "a\u202eb") if setting.length)
        if setting.types == (int,):
            yield 1.5, "", "wrong_type"
        if setting.all_choices:
            yield "no such name", "", "unknown_choice"
        elif str not in setting.types and Path not in setting.types:
            yield "no number", "", "wrong_type"
        elif int not in setting.types:
            yield 5, "", "wrong_type"
    if not setting.optional:
        yield None, "", "unknown_choice" if setting.choices and not setting.types else "wrong_type"


def lengths(setting: Setting, one: Any) -> Iterator[Any]:
    """A text or list that is too short, and one that is too long."""
    if setting.length is not None and setting.length.low:
        yield one * (setting.length.low - 1)
    if setting.length is not None and setting.length.high is not None:
        yield one * (setting.length.high + 1)


def beyond(setting: Setting) -> Iterator[float]:
    """Numbers just outside the range, and those that are none."""
    limits = setting.range or Range()
    step = 1 if int in setting.types else 1e-6
    values = [low - step * max(1, abs(low)) for low in [limits.low] if low is not None]
    values += [high + step * max(1, abs(high)) for high in [limits.high] if high is not None]
    values += [end for end in (limits.above, limits.below) if end is not None]
    if limits.step is not None and (limits.step != 1 or float in setting.types):
        values.append((limits.low or 0) + 1.5 * limits.step)
    if float in setting.types:
        values += [math.nan, math.inf, -math.inf]
    yield from (value if float in setting.types else int(value) for value in values if value != limits.also)


def ends(setting: Setting) -> Iterator[float]:
    """The first and last number of the range, and the one that is accepted besides."""
    if setting.range is not None:
        kind = int if int in setting.types and float not in setting.types else float
        for value in (setting.range.low, setting.range.high, setting.range.also):
            if value is not None:
                yield kind(value)


def least(config: type) -> dict[str, Any]:
    """Plain values of what must be given."""
    return {name: MUST_HAVE.get(name, some(setting)) for name, setting in settings(config).items() if setting.required}


def some(setting: Setting) -> Any:
    if setting.item is not None:
        return [some(setting.item)]
    if setting.group is not None:
        return least(setting.group)
    if any(get_origin(kind) is dict for kind in setting.types):
        return {}
    if any(kind in (int, float) for kind in setting.types):
        return next(ends(setting), 1)
    if setting.all_choices:
        return setting.all_choices[0]
    return "a" * 32


def faults_of(config: type, values: dict[str, Any]) -> list[tuple[str | None, str]]:
    """Fields and codes of the errors of plain values; none if they are accepted."""
    try:
        read(config, values)
    except ConfigError as failure:
        return [(one.field, one.code) for one in (failure, *failure.more)]
    return []


@pytest.mark.parametrize(("config", "setting"), EACH)
def test_a_value_outside_its_declaration_is_refused_with_its_field(config: type, setting: Setting):
    for value, where, code in outside(setting):
        assert faults_of(config, {**least(config), setting.name: value}) == [(f"config.{setting.name}{where}", code)], (
            value
        )


def test_every_class_of_settings_that_people_write_has_its_table_in_the_documentation():
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    written = [one for one in CLASSES if not one.__module__.startswith(REQUESTS)]

    assert [one for one in written if f"<!-- settings: {one.__module__}.{one.__name__} -->" not in pages] == []


@pytest.mark.parametrize(("config", "setting"), EACH)
def test_the_ends_of_a_range_are_accepted(config: type, setting: Setting):
    for value in ends(setting):
        faults = faults_of(config, {**least(config), setting.name: value})

        assert [code for field, code in faults if field == f"config.{setting.name}" and code != "conflict"] == []


@pytest.mark.parametrize(
    "config", [one for one in CLASSES if hasattr(one, "__post_init__")], ids=lambda one: one.__name__
)
def test_a_class_that_is_made_directly_refuses_the_same(config: type):
    whole = read(config, least(config))
    given = {name: getattr(whole, name) for name in least(config)}

    for name, setting in settings(config).items():
        for value, where, code in outside(setting):
            with pytest.raises(ConfigError) as caught:
                config(**{**given, name: value})
            assert (caught.value.field, caught.value.code) == (f"{name}{where}", code)


@pytest.mark.parametrize("kind", KINDS)
def test_the_request_of_a_job_and_its_schema_refuse_the_same(kind: str):
    config = KINDS[kind].config
    described = jsonschema.Draft202012Validator(config_schema(kind))
    assert described.is_valid(least(config))

    for name, setting in settings(config).items():
        for value, where, code in outside(setting):
            values = {**least(config), name: value}
            with pytest.raises(ConfigError) as caught:
                read_body({"kind": kind, "name": "a job", "config": values})
            assert (caught.value.field, caught.value.code) == (f"config.{name}{where}", code)
            is_json = not isinstance(value, float) or math.isfinite(value)
            assert not (is_json and described.is_valid(values)), f"the schema accepts {name}={value!r}"


def options_of(command: str) -> Iterator[tuple[str, Setting]]:
    """The options of a command that are settings: how each is written, and the setting."""
    group: Any = typer.main.get_command(app)
    for word in command.split():
        group = group.commands[word]
    declared = settings(COMMANDS[command][0])
    for parameter in group.params:
        setting = declared.get(parameter.name)
        if setting is not None and bool not in setting.types and setting.group is None:
            yield parameter.opts[0], setting


def typed(setting: Setting) -> Iterator[str]:
    """What the setting must refuse and can be typed: one word, which could not be meant otherwise."""
    for value, _, code in outside(setting):
        one = value[0] if isinstance(value, list) and len(value) == 1 else value
        is_text = str in (setting.item or setting).types and code == "wrong_type"  # 5 is a text as well
        is_list = setting.item is not None and one is value  # 3 is a list of one
        is_word = isinstance(one, int | float | str) and one is not True and code not in ("wrong_length", "unprintable")
        if is_word and not is_text and not is_list:
            yield str(one)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_refuses_the_same_in_one_line_and_makes_nothing(command: str, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = [] if command == "segment tune" else ["--out", "out"]

    for option, setting in options_of(command):
        for word in typed(setting):
            assert main([*command.split(), *COMMANDS[command][1], *out, f"{option}={word}"]) == 2, (option, word)
            said = capsys.readouterr()
            assert said.out == ""
            assert re.search(rf"^error: (invalid value for '{option}'|{option}\b)", said.err, re.M), said.err
            assert word.removesuffix(".0") in said.err.lower()
            assert "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == []
