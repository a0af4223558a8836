"""Commands run in this process, as most tests of the command line do: starting Python and torch takes seconds."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from brim.cli import main


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def brim(*argv: str | Path) -> Ended:
    """How a command ended."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([*map(str, argv)])
    return Ended(code, out.getvalue(), err.getvalue())


def answer(*argv: str | Path, code: int = 0) -> dict[str, Any]:
    """The JSON of a command, the only thing on its standard output."""
    ended = brim(*argv, "--json")
    assert ended.code == code, ended.err
    assert ended.out.count("\n") == 1
    return dict(json.loads(ended.out))


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    """What a report says besides how long it took."""
    times = ("wall_s", "startup_s", "work_s", "overhead", "ceiling_share", "ceiling_spread")
    return {name: value for name, value in report.items() if name not in times}


def refused(*argv: str | Path) -> str:
    """The message of a command that must fail with 2 and one line; a usage error adds where to find help."""
    ended = brim(*argv)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert "Traceback" not in ended.err
    assert len([line for line in ended.err.splitlines() if not line.startswith("run ")]) == 1
    return ended.err
