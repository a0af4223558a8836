"""Damaged inputs for every parser of bytes from outside: brim's own errors, little work, little memory, nothing else.

The same inputs in every run; `make soak` makes a million of others. The input of a bug goes to tests/fuzz/found, where
every run tries it again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fuzz_parsers import PARSERS

INPUTS = int(os.environ.get("BRIM_FUZZ_INPUTS", "12_000"))
SEED = int(os.environ.get("BRIM_FUZZ_SEED", "0"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    command = [sys.executable, Path(__file__).with_name("fuzz_run.py"), "--inputs", str(INPUTS), "--seed", str(SEED)]
    out = tmp_path_factory.mktemp("bugs")
    done = subprocess.run([*command, "--out", out], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr[-3000:]
    return {line["parser"]: line for line in lines}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [parser.name for parser in PARSERS])
def test_a_damaged_input_costs_little_and_raises_only_our_errors(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]

    assert "bug" not in result, f"{result['bug']}\ninput: {Path(result['input']).read_bytes()[:2000]!r}"
    assert result["rejected"] < result["inputs"]
