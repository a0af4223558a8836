"""Options made from settings, help, completion, and what the command line says to a word it does not know."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from brim.cli import app, main
from brim.cli.options import from_settings, needing_service
from brim.config import Doc, Range, Unit
from brim.errors import ConfigError


def commands(group: Any, path: str = "brim") -> Iterator[tuple[str, Any]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{path} {name}")


TREE = dict(commands(typer.main.get_command(app)))


# Help


@pytest.mark.parametrize("path", TREE)
def test_every_command_s_help_has_an_example_of_itself(path, capsys):
    assert main([*path.split()[1:], "--help"]) == 0

    printed = " ".join(capsys.readouterr().out.split())
    assert "Example: " in printed
    assert printed.split("Example: ")[1].startswith(path)


@pytest.mark.parametrize("path", TREE)
def test_an_example_names_commands_and_options_that_exist(path):
    words = TREE[path].epilog.removeprefix("Example: ").partition(" -- ")[0].split()  # then a command of the user's
    shown = next(known for known in sorted(TREE, key=len, reverse=True) if " ".join(words).startswith(known))
    flags = {word for word in words if word.startswith("--")}

    assert flags <= {name for param in TREE[shown].params for name in param.opts}


# Words


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("genrate", "no such command 'genrate'; did you mean 'brim rf generate'?"),
        ("evaluate", "no such command 'evaluate'; did you mean 'brim rf evaluate' or 'brim sequence evaluate'?"),
        ("xyzzy", "no such command 'xyzzy'\n"),
        ("rf generate --sampels 3", "no such option '--sampels'; did you mean '--samples'?"),
        ("rf generate --out d --preset qualty", "did you mean quality?"),
        ("segment train --images i --masks m --out r --model unet", "did you mean unet_tiny?"),
        ("segment tune --models hrnet,resunet_smal", "did you mean resunet_small?"),
        ("datasets list --kind image", "did you mean images?"),
    ],
)
def test_a_word_that_does_not_exist_gets_the_nearest_that_does(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert main(argv.split()) == 2

    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert said in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


# Completion


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["brim", "se"], {"segment", "sequence", "serve"}),
        (["brim", "rf", "generate", "--min"], {"--min-snr-db", "--min-receivers"}),
        (["brim", "rf", "generate", "--waveform", "n"], {"nbfm"}),
        (["brim", "segment", "predict", "--model", "resunet_"], {"resunet_small", "resunet_advanced"}),
    ],
)
def test_the_shell_completes_commands_options_and_choices(words, offered, monkeypatch, capsys):
    monkeypatch.setenv("_BRIM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))

    with pytest.raises(SystemExit):
        main([])

    assert set(capsys.readouterr().out.split()) == offered


def test_the_script_loads_in_bash_and_completes(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "brim").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m brim "$@"\n')
    (folder / "brim").chmod(0o755)
    script = (
        'eval "$(brim --show-completion)"\nCOMP_WORDS=(brim sequence ab) COMP_CWORD=2\n'
        '_brim_completion brim\necho "${COMPREPLY[@]}"\n'
    )
    path = os.pathsep.join([str(folder), os.environ["PATH"]])

    done = subprocess.run(["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True)

    assert (done.stdout.split(), done.stderr) == (["ablate"], "")


# Options made from settings


@dataclass(frozen=True, kw_only=True)
class Radio:
    power_dbm: Annotated[float, Range(0, 50), Unit("dBm"), Doc("Transmit power.")] = 40.0
    epochs: Annotated[int | None, Range(1), Doc("Passes over the data.")] = None
    mode: Annotated[Literal["am", "fm"], Doc("Modulation.")] = "fm"
    networks: Annotated[tuple[str, ...], Doc("Networks.")] = ("a", "b")
    use_random_receivers: Annotated[bool, Doc("Random receivers.")] = False
    seed: Annotated[int, Range(0, 2**63), Doc("Seed.")] = 0


def radio_command(**options: Any) -> tuple[typer.Typer, list[dict[str, Any]]]:
    """A command whose options are the settings of Radio, and what it is called with."""
    app, calls = typer.Typer(), []

    @app.command()
    @from_settings(Radio, *(field.name for field in fields(Radio)), **options)
    def command(*, out: str, settings: dict[str, Any], loud: bool = False) -> None:
        calls.append({"out": out, "loud": loud, **settings})

    return app, calls


def test_settings_become_options_with_their_defaults():
    app, calls = radio_command()

    assert CliRunner().invoke(app, ["x", "--power-dbm", "3", "--networks", "c,d", "--random-receivers"]).exit_code == 0

    assert calls == [
        {
            **{**asdict(Radio()), "out": "x", "loud": False},
            **{"power_dbm": 3.0, "networks": ("c", "d"), "use_random_receivers": True},
        }
    ]


def test_only_given_options_are_passed_on_where_something_lies_underneath():
    app, calls = radio_command(only_given=True)

    assert CliRunner().invoke(app, ["x", "--power-dbm", "0", "--seed", "0"]).exit_code == 0

    assert calls == [{"out": "x", "loud": False, "power_dbm": 0.0, "seed": 0}]


# Extras that are not installed


def test_a_missing_extra_is_named_with_its_install():
    with pytest.raises(ConfigError, match=r"nowhere is not installed.*brim\[service\]"), needing_service("this"):
        import nowhere  # noqa: F401


def test_a_module_of_our_own_that_is_missing_is_our_own_mistake():
    with pytest.raises(ModuleNotFoundError, match="brim"), needing_service("this"):
        import brim.nowhere  # noqa: F401
