"""What the documents say works: their commands run, their links resolve, nothing public is left out."""

import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import typer

from brim.cli import main
from brim.cli.rf import rf
from brim.cli.segment import segment
from brim.cli.sequence import sequence
from brim.rf import FEATURES, TRUTH
from waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[1]
RADIO = ROOT / "docs" / "radio.md"
SEGMENTATION = ROOT / "docs" / "segmentation.md"
SEQUENCES = ROOT / "docs" / "sequences.md"
# Documents whose code blocks are executed, each in a directory of its own.
RUN = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("radio", "segmentation", "sequences"))]
RUN += [ROOT / "docs" / f"{name}.md" for name in ("training", "networks", "library")]
SERVED = [ROOT / "docs" / "service.md", ROOT / "docs" / "prediction.md"]  # likewise, with a service in the background
SKIP = "<!-- skip -->"  # on the line before a block that is not to be executed
INTERPRETERS = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced piece of a document."""

    line: int
    language: str
    code: str
    skipped: bool


def blocks_of(text: str) -> list[Block]:
    out = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        skipped = before.rstrip().endswith(SKIP)
        out.append(Block(before.count("\n") + 1, match[1], match[2], skipped))
    return out


def documents() -> list[Path]:
    places = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    return sorted(places)


def run(command: list[str], where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=where, capture_output=True, text=True)


def anchors(text: str) -> set[str]:
    """The fragments a page of this text offers, as GitHub makes them."""
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(_FENCE.sub("", text))]
    return {heading.strip().replace(" ", "-") for heading in plain}


# Code


@pytest.mark.parametrize("document", [
    pytest.param(path, marks=[] if path.name == "README.md" else pytest.mark.long, id=path.name) for path in RUN
])  # fmt: skip
def test_the_code_blocks_run_one_after_another(document, tmp_path, monkeypatch):
    blocks = [b for b in blocks_of(document.read_text()) if b.language in INTERPRETERS and not b.skipped]
    assert {block.language for block in blocks} == {"sh", "python"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    if document.name != "README.md":  # which runs as it stands
        blocks = [replace(block, code=shortened(block.code)) for block in blocks]
    for block in blocks:
        failure = run_block(block, tmp_path)
        assert failure is None, f"{document.name}, line {block.line}:\n{block.code}\n{failure}"


def shortened(code: str) -> str:
    """The same commands over fewer epochs, samples and seconds: that they work is tested here, not how well."""
    for option, most in (("epochs", 2), ("samples", 12), ("seconds", 2)):
        pattern = rf"((?:--|--\w+-){option} |\b{option}=|\w+_{option}=)(\d+)"
        code = re.sub(pattern, lambda match, most=most: match[1] + str(min(most, int(match[2]))), code)
    return code


def run_block(block: Block, where: Path) -> str | None:
    """Run a block in this process where it is only Python and brim commands, else in a shell; the failure, if any."""
    if block.language == "python":
        exec(compile(block.code, "block", "exec"), {"__name__": "__main__"})
        return None
    lines = block.code.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    if any(not _is_plain(line, words) for line, words in zip(lines, commands, strict=True)):
        done = run([*INTERPRETERS["sh"], block.code], where)
        return None if done.returncode == 0 else done.stderr
    for words in filter(None, commands):
        if words[0] == "brim":
            if (code := main(words[1:])) != 0:
                return f"{shlex.join(words)}: exit code {code}"
        else:
            exec(words[2], {"__name__": "__main__"})
    return None


def _is_plain(line: str, words: list[str]) -> bool:
    """Whether it is a comment, a brim command or `python -c CODE`, without anything a shell would have to expand."""
    if not words:
        return True
    known = words[0] == "brim" or (words[:2] == ["python", "-c"] and len(words) == 3)
    return known and not re.search(r"[|&;<>$`*?~]", re.sub(r"'[^']*'|#.*", "", line))


@pytest.mark.long
@pytest.mark.parametrize("document", SERVED, ids=lambda path: path.name)
def test_the_code_blocks_run_against_a_service(document, tmp_path):
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    blocks = [b for b in blocks_of(document.read_text()) if b.language == "sh" and not b.skipped]
    service = Service(tmp_path)
    try:
        for block in blocks:
            done = service.run(shortened(block.code))
            assert done.returncode == 0, (
                f"{document.name}, line {block.line}:\n{block.code}\n{done.stdout}{done.stderr}"
            )
        assert service.is_up()
    finally:
        service.stop()


class Service:
    """Runs the blocks of a document that starts a service in the background: on a free port, and stopped at the end."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.folder, self.groups = folder, list[int]()
        self.service: subprocess.Popen[bytes] | None = None
        (folder / ".curlrc").write_text("fail-with-body\n")  # a refusal ends the block
        self.env = {**os.environ, "CURL_HOME": str(folder), "BRIM_URL": f"http://127.0.0.1:{self.port}"}
        self.env |= {"BRIM_LOG_LEVEL": "WARNING", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(folder / ".cache")}
        self.env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        """One block, as it stands but for the port; one that starts a service is over when that answers."""
        code = code.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        before, *served = re.split(r"^brim serve ([^&]*)&.*$", code, maxsplit=1, flags=re.M)
        done = self._shell(before)
        if done.returncode == 0 and served:
            self._serve(shlex.split(served[0]))
            done = self._shell(served[1])
        return done

    def _shell(self, code: str) -> subprocess.CompletedProcess[str]:
        command = [*INTERPRETERS["sh"], code]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.groups.append(process.pid)
        out, err = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def _serve(self, options: list[str]) -> None:
        with (self.folder / "serve.log").open("wb") as log:
            process = subprocess.Popen(
                ["brim", "serve", "--port", str(self.port), *options], cwd=self.folder, env=self.env, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        self.groups.append(process.pid)
        self.service = process
        until(lambda: process.poll() is not None or self.is_up())
        assert process.poll() is None, (self.folder / "serve.log").read_text()

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=PATIENCE_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """End what the blocks left running, politely, then not."""
        if self.service is not None:
            self.service.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.service.wait(PATIENCE_S)
        for group in self.groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


@pytest.mark.parametrize("script", [
    # submit_jobs.py starts a service
    pytest.param(path, id=path.name, marks=pytest.mark.long if path.name == "submit_jobs.py" else ())
    for path in sorted((ROOT / "examples").glob("*.py"))
])  # fmt: skip
def test_an_example_runs(script, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(script)])

    runpy.run_path(str(script), run_name="__main__")

    assert capfd.readouterr().out


# Links


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(document):
    broken = []
    for link in _LINK.findall(_FENCE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        known = anchors(target.read_text()) if target.suffix == ".md" and target.exists() else set()
        if not target.exists() or (fragment and fragment not in known):
            broken.append(link)

    assert broken == []


# Completeness


def test_the_modules_that_the_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([a-z_]+/[a-z_/]+(?:\.py|/))`", _FENCE.sub("", text))

    assert named
    assert [name for name in named if not (ROOT / "src" / "brim" / name).exists() and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda path: path.name)
def test_the_tables_of_settings_are_up_to_date(page):
    refreshed = runpy.run_path(str(ROOT / "docs" / "hooks" / "settings.py"))["refreshed"]
    text = page.read_text()

    assert text == refreshed(text), "run .venv/bin/python docs/hooks/settings.py"


@pytest.mark.parametrize("name_and_unit", [*FEATURES, *TRUTH], ids=lambda pair: pair[0])
def test_every_feature_and_truth_is_in_a_table_with_its_unit(name_and_unit):
    name, unit = name_and_unit
    units = re.findall(rf"^\| `{name}` \| ([^|]*) \|", RADIO.read_text(), re.MULTILINE)

    assert unit.replace("us", "µs") in units


@pytest.mark.parametrize(
    ("group", "command", "page"),
    [
        (rf, "generate", RADIO),
        *((segment, command, SEGMENTATION) for command in ("tune", "predict", "train", "sample")),
        *((sequence, command, SEQUENCES) for command in typer.main.get_command(sequence).commands),
    ],
)
def test_every_option_is_documented(group, command, page):
    params = typer.main.get_command(group).commands[command].params
    options = [param.opts[0] for param in params if param.opts[0].startswith("--")]

    assert [option for option in options if f"`{option}" not in page.read_text()] == []
