"""Plants the bugs of mutants.toml one at a time, each in a copy of its own, and checks that their tests fail.

    make mutants               all of them
    make mutants ROOM=rf       those in one room of src/brim

A bug is a text of one file of `src` and what replaces it, with the tests that must fail then. The table says of each
bug that was not caught which of its tests passed; the last line is the score, and the exit code is 1 below 100 %.
"""

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import forks

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "docs", "examples", "benchmarks", "deploy")  # with the files beside them
LIMIT_S = 600.0
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    bug: str  # one sentence: what is wrong with it
    file: str
    before: str  # occurs in the file once
    after: str
    tests: list[str] = field(default_factory=list)  # node ids; a test with cases counts as failed with one of them

    @property
    def room(self) -> str:
        parts = Path(self.file).parts
        return parts[2] if len(parts) > 3 else "brim"

    def plant(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} has {text.count(self.before)} times, not once: {self.before!r}")
        planted = text.replace(self.before, self.after)
        ast.parse(planted)  # a file that is no Python would fail every test
        path.write_text(planted)


def read(path: Path) -> list[Mutant]:
    return [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]


def survived(mutant: Mutant) -> str:
    """Which of its tests did not fail with the mutant planted, or why that is not known; empty if it was caught."""
    with tempfile.TemporaryDirectory(prefix="brim-mutant-") as folder:
        copy = Path(folder) / "brim"
        copy.mkdir()
        if (shared := ROOT.parent / "shared").exists():  # real data, where tests look for it
            (copy.parent / "shared").symlink_to(shared)
        for path in ROOT.iterdir():
            if path.name in COPIED:
                shutil.copytree(path, copy / path.name, symlinks=True)
            elif path.is_file():
                shutil.copy2(path, copy)
        mutant.plant(copy)
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "--color=no", "-p", "no:cacheprovider"]
        output = copy / "output.txt"
        with output.open("w") as file:
            environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
            process = subprocess.Popen(
                [*command, *mutant.tests], cwd=copy, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                return f"did not end within {LIMIT_S:.0f} s"
            finally:
                end_group(process)
        text = output.read_text()
    failed = {name.partition("[")[0] for name in FAILED.findall(text)} | set(FAILED.findall(text))
    if process.returncode not in (0, 1):
        return f"pytest ended with {process.returncode}: {text.strip().splitlines()[-1] if text.strip() else ''}"
    return ", ".join(f"{test} passed" for test in mutant.tests if test not in failed)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """The tests of a mutant may leave processes behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def results(mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, str]]:
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(mutants, pool.map(survived, mutants), strict=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", default="", help="a folder of src/brim, or part of a file's path")
    parser.add_argument("--list", type=Path, default=ROOT / "tests" / "mutants.toml", help="another list")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    options = parser.parse_args()
    listed = read(options.list)
    mutants = [one for one in listed if options.room == one.room] or [one for one in listed if options.room in one.file]
    if not mutants:
        parser.error(f"no mutant of {options.list} is in {options.room!r}")
    forks.install()  # torch is loaded once
    forks.start()
    caught, planted = Counter[str](), Counter[str]()
    for number, (mutant, why) in enumerate(results(mutants, options.jobs), 1):
        planted[mutant.room] += 1
        caught[mutant.room] += not why
        print(f"{number:4}/{len(mutants)} {'SURVIVED' if why else 'caught  '} {mutant.file}: {mutant.bug}", flush=True)
        if why:
            print(f"          {why}", flush=True)
    print(f"\n{'room':<14}{'planted':>8}{'caught':>8}{'score':>8}")
    for room in sorted(planted):
        print(f"{room:<14}{planted[room]:>8}{caught[room]:>8}{caught[room] / planted[room]:>8.0%}")
    total = caught.total()
    print(f"{total} of {len(mutants)} mutants caught: {total / len(mutants):.0%}")
    return int(total < len(mutants))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; no file of this checkout was changed", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
