"""Help, completion and what the command line says to a word it does not know."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from brim.cli import app, main
from brim.cli.segment import NETWORKS
from brim.cli.words import nearest
from brim.segmentation.networks.registry import model_names


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
    words = TREE[path].epilog.removeprefix("Example: ").split()
    shown = next(known for known in sorted(TREE, key=len, reverse=True) if " ".join(words).startswith(known))
    flags = {word for word in words if word.startswith("--")}

    assert flags <= {name for param in TREE[shown].params for name in param.opts}


# Words


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("genrate", "no such command 'genrate'; did you mean 'brim rf generate'?"),
        ("seqence", "no such command 'seqence'; did you mean 'sequence'?"),
        (
            "train",
            "no such command 'train'; did you mean 'brim rf train', 'brim segment train' or 'brim sequence train'?",
        ),
        ("jobs submti job.json", "no such command 'submti'; did you mean 'submit'?"),
        ("xyzzy", "no such command 'xyzzy'\n"),
        ("rf generate --sampels 3", "no such option '--sampels'; did you mean '--samples'?"),
        ("serve --prot 9", "no such option '--prot'; did you mean '--port'?"),
        ("doctor --zzzz", "no such option '--zzzz'\n"),
        ("rf generate --out d --preset qualty", "choose one of production, quality; did you mean quality?"),
        ("rf generate --out d --waveform NBFM", "did you mean nbfm?"),
        ("rf train d --out r --tier vrma", "did you mean vram?"),
        ("rf export d --out e --format parqet", "did you mean parquet?"),
        ("segment train --images i --masks m --out r --model hrnt", "--model hrnt is unknown; choose one of hrnet"),
        ("segment predict i --weights w --out o --model unet_tny", "did you mean unet_tiny?"),
        ("segment predict i --weights w --out o --model hrnet --format geojsn", "did you mean geojson?"),
        ("segment predict i --weights w --out o --model hrnet --precision fp61", "did you mean fp16?"),
        ("segment tune --models hrnet,resunet_smal", "did you mean resunet_small?"),
        ("sequence train c --out r --mode supervized", "did you mean supervised?"),
        ("datasets list --kind image", "did you mean images?"),
        ("jobs list --status complted", "did you mean completed?"),
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


def test_a_word_like_none_has_no_nearest():
    assert nearest("xyzzy", ["generate", "train"]) is None
    assert nearest("", []) is None
    assert nearest("GENERATE", ["generate", "train"]) == "generate"


# Completion


def complete(*words: str) -> list[str]:
    """What bash is offered for the last word."""
    asked = {"_BRIM_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "brim"], env={**os.environ, **asked}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_the_shell_is_printed(shell):
    done = subprocess.run([sys.executable, "-m", "brim", "--show-completion", shell], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert "_BRIM_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["brim", "se"], {"segment", "sequence", "serve"}),
        (["brim", "rf", "ge"], {"generate"}),
        (["brim", "rf", "generate", "--min"], {"--min-snr-db", "--min-receivers"}),
        (["brim", "rf", "train", "--tier", "v"], {"vram"}),
        (["brim", "segment", "predict", "--model", "resunet_"], {"resunet_small", "resunet_advanced"}),
    ],
)
def test_the_shell_completes_commands_options_and_choices(words, offered):
    assert set(complete(*words)) == offered


def test_the_script_loads_in_bash_and_completes(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "brim").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m brim "$@"\n')
    (folder / "brim").chmod(0o755)
    script = (
        'eval "$(brim --show-completion bash)"\nCOMP_WORDS=(brim sequence ab) COMP_CWORD=2\n'
        '_brim_completion brim\necho "${COMPREPLY[@]}"\n'
    )
    path = os.pathsep.join([str(folder), os.environ["PATH"]])

    done = subprocess.run(["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True)

    assert (done.stdout.split(), done.stderr) == (["ablate"], "")


def test_the_networks_offered_are_those_built_in():
    built_in = {
        name for name in model_names() if name.startswith(("hrnet", "resunet", "unet"))
    }  # tests register others

    assert set(NETWORKS) == built_in
