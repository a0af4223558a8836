"""Errors are data: below the command line no string names an option or a command, and no code parses a message."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "brim"
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
COMMAND = re.compile(r"\bbrim (rf|segment|sequence|serve|jobs|datasets|models|demo|doctor)\b")

SURFACES = ("cli", "__main__.py", "doctor.py")  # they speak to a person at a terminal
# Strings that are for a command line after all: file and beginning, and the reason.
EXCEPTIONS = {
    ("cluster/exposure.py", "start Ray with --node-ip-address"): "an option of Ray",
    ("cluster/exposure.py", "start Ray with --dashboard-host"): "an option of Ray",
    ("cluster/ray_connect.py", "start one with ray start --head"): "an option of Ray",
    ("service/api/routes/locate.py", 'As "brim rf locate" reads them'): "documents a request body by its file format",
    ("service/dashboard/lists.py", "Generate radio samples, upload images"): "tells an administrator what to type",
    ("service/dashboard/segment.py", 'Add one with "brim models add'): "tells an administrator what to type",
    ("service/dashboard/job.py", "brim jobs submit - --url"): "a form, copied as a command",
    ("service/dashboard/job.py", " --token-file "): "a form, copied as a command",
    ("service/dashboard/why.py", "brim why --json"): "tells what to type",
    ("service/dashboard/why.py", "An answer of brim why"): "tells what to type",
    ("service/dashboard/why.py", "This file is no answer"): "tells what to type",
}


def files() -> list[Path]:
    return [file for file in sorted(ROOT.rglob("*.py")) if file.relative_to(ROOT).parts[0] not in SURFACES]


def docstrings(tree: ast.AST) -> set[ast.Constant]:
    """Documentation, not messages."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = (node.body[0] for node in ast.walk(tree) if isinstance(node, owners) and node.body)
    return {one.value for one in first if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)}


def spoken(source: str) -> Iterator[tuple[int, str]]:
    """Strings that name an option or a command."""
    tree = ast.parse(source)
    documentation = docstrings(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or node in documentation:
            continue
        is_css = "var(--" in node.value
        if COMMAND.search(node.value) or (OPTION.search(node.value) and not is_css):
            yield node.lineno, node.value


def parsed(source: str) -> Iterator[tuple[int, str]]:
    """Places where the text of a caught error is searched."""
    tree = ast.parse(source)
    caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}

    def is_text(node: ast.AST) -> bool:
        is_str = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str"
        return is_str and len(node.args) == 1 and isinstance(node.args[0], ast.Name) and node.args[0].id in caught

    for node in ast.walk(tree):
        searched: list[ast.AST] = []
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn | ast.Eq) for op in node.ops):
            searched = [node.left, *node.comparators]
        elif isinstance(node, ast.Attribute) and node.attr in ("startswith", "endswith", "find", "index", "partition"):
            searched = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            searched = list(node.args) if is_re else []
        if any(map(is_text, searched)):
            yield node.lineno, ast.unparse(node)


def test_no_message_below_the_command_line_names_an_option_or_a_command():
    strings = []
    for file in files():
        name = file.relative_to(ROOT).as_posix()
        for line, text in spoken(file.read_text()):
            if not any(name == where and text.startswith(start) for where, start in EXCEPTIONS):
                strings.append(f"{name}:{line} {text!r}")

    assert strings == [], "say it with a hint: {resume} for a setting, {rf generate} for a command"


@pytest.mark.parametrize("file", files(), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_code_parses_the_message_of_an_error(file):
    assert list(parsed(file.read_text())) == [], "compare its type, code or field"


def test_what_is_looked_for_is_found():
    assert list(spoken('f"{x}; add --resume"')) == [(1, "; add --resume")]
    assert list(spoken('x = "start brim serve"')) == [(1, "start brim serve")]
    assert list(spoken('"""Docs of brim serve --port."""')) == []
    caught = "try: f()\nexcept E as e:\n    "
    for line in ("if 'x' in str(e): pass", "str(e).startswith('x')", "re.match('x', str(e))"):
        assert len(list(parsed(caught + line))) == 1, line
    assert list(parsed(caught + "log(str(e))")) == []
