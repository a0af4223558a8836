"""What every test keeps to: no clock decides, nothing is tried twice, real data is not passed over.

And that the bugs of `mutants.toml` can be planted; `make mutants` plants them.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import mutants
from real_data import real_files

TESTS = Path(__file__).parent
FILES = sorted(path for path in TESTS.rglob("*.py") if path.name != "waiting.py")
CLOCK = re.compile(r"\btime\.(time|monotonic|perf_counter|process_time|thread_time)(_ns)?\(")


def is_span(node: ast.AST) -> bool:
    """Whether it adds to a clock or subtracts from one: a time that has passed, or one until which to wait."""
    sums = (part for part in ast.walk(node) if isinstance(part, ast.BinOp))
    return any(CLOCK.search(ast.unparse(part)) for part in sums)


def clock_asserts(source: str) -> Iterator[int]:
    """Lines that assert something about a span, also by a name it has in the same function; moments may be ordered."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        spans = {ast.unparse(node.targets[0]) for node in assigned if is_span(node.value)}
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                names = {
                    ast.unparse(part) for part in ast.walk(node.test) if isinstance(part, (ast.Name, ast.Attribute))
                }
                if is_span(node.test) or names & spans:
                    yield node.lineno


@pytest.mark.parametrize("assertion", [
    "assert time.monotonic() - began < 5",
    "took_s = time.perf_counter() - began; assert took_s < 5",
    "self.took = time.process_time() - began; assert max(self.took, 1) < 5",
    "end = time.monotonic() + 5; assert time.monotonic() < end",
])  # fmt: skip
def test_an_assertion_over_a_clock_is_noticed(assertion):
    assert list(clock_asserts(f"def test():\n    {assertion}")) == [2]


def test_moments_may_be_ordered():
    assert list(clock_asserts("def test():\n    before = time.time()\n    assert before < told < time.time()")) == []


def test_no_test_asserts_how_long_something_took():
    """Not those on a GPU, whose times are what they are about: `make gpu` runs them on a machine of their own."""
    files = [path for path in FILES if "gpu" not in path.parts]

    assert {path.name: lines for path in files if (lines := list(clock_asserts(path.read_text())))} == {}


def test_no_test_is_tried_twice():
    assert [path.name for path in FILES if re.search(r"mark\.flaky|\breruns=", path.read_text())] == []


def test_real_data_that_is_there_is_read(tmp_path):
    (tmp_path / "recordings").mkdir()
    (tmp_path / "recordings" / "a.wav").touch()

    assert [path.name for path in real_files("recordings/*.wav", tmp_path)] == ["a.wav"]


@pytest.mark.parametrize(
    ("folder", "ci", "ending"),
    [(".", "true", pytest.fail.Exception), (".", "", pytest.skip.Exception), ("none", "true", pytest.skip.Exception)],
)
def test_real_data_that_is_missing_fails_in_ci_where_its_folder_is_there(folder, ci, ending, tmp_path, monkeypatch):
    monkeypatch.setenv("CI", ci)

    with pytest.raises(ending, match=r"recordings/\*\.wav"):
        real_files("recordings/*.wav", tmp_path / folder)


def test_listed_bugs_can_be_planted_and_their_tests_exist():
    text = cache(lambda path: (TESTS.parent / path).read_text())
    listed = mutants.read(TESTS / "mutants.toml")
    tests = [test.partition("[")[0] for one in listed for test in one.tests]
    named = [(test.partition("::")[0], test.rpartition("::")[2]) for test in tests]

    assert [one.bug for one in listed if text(one.file).count(one.before) != 1 or not one.tests] == []
    assert [(file, name) for file, name in named if f"def {name}(" not in text(file)] == []


def test_planting_tells_bugs_that_are_noticed_from_those_that_are_not(tmp_path):
    """The second only adds a space."""
    first = next(one for one in mutants.read(TESTS / "mutants.toml") if one.room == "config")
    entry = "[[mutant]]\nbug = {!r}\nfile = {!r}\nbefore = {!r}\nafter = {!r}\ntests = {!r}\n"
    same = f"{first.before} "
    entries = [entry.format(first.bug, first.file, first.before, after, first.tests) for after in (first.after, same)]
    (tmp_path / "list.toml").write_text("\n".join(entries))

    done = subprocess.run(
        [sys.executable, mutants.__file__, "--list", tmp_path / "list.toml"], capture_output=True, text=True
    )

    assert (done.returncode, "1 of 2 mutants caught: 50%" in done.stdout) == (1, True)
    assert f"{first.tests[0]} passed" in done.stdout
