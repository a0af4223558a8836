"""python tests/fuzz/fuzz_run.py [--inputs N] [--seed S] [--out FOLDER] [PARSER …]

Feeds every parser with damaged inputs and prints a line of JSON for each parser. A parser runs in its own process, with
limits on its memory; the same seed gives the same inputs.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import mmap
import os
import random
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz_mutations import mutate, mutate_json
from fuzz_parsers import PARSERS, Parser, folder

CALLS = 15_000_000  # of functions, for one input; an audio file has needed 4.6 million
MEMORY_BYTES = 512 * 2**20  # address space that one input may need
GROWTH_BYTES = 32 * 2**20  # resident memory that may be kept between the first tenth of the inputs and the last
FOUND = Path(__file__).with_name("found")  # inputs that once were bugs: PARSER.NUMBER, spaces as -


def inputs_of(parser: Parser, seeds: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Valid inputs, inputs that once were bugs, then damaged ones."""
    old = [file.read_bytes() for file in sorted(FOUND.glob(f"{parser.name.replace(' ', '-')}.*"))]
    yield from (*seeds, *old)
    for number in range(count):
        rng = random.Random(f"{seed} {parser.name} {number}")
        if parser.is_json and number % 2:
            yield mutate_json(rng, seeds)
        else:
            yield mutate(rng, seeds + old, parser.tokens)


def attack(parser: Parser, count: int, seed: int, current: mmap.mmap) -> dict[str, Any]:
    """Call the parser with every input; the first bug ends it."""
    result: dict[str, Any] = {"parser": parser.name, "inputs": 0, "rejected": 0, "most_calls": 0}
    warm, calls, seeds = 0, 0, list(parser.seeds())

    def note_call(*_: Any) -> None:
        nonlocal calls
        calls += 1

    with contextlib.suppress(Exception):
        parser.call(seeds[0])  # what it imports is not the input's cost
    for number, data in enumerate(inputs_of(parser, seeds, count, seed)):
        current.seek(0)
        current.write(len(data).to_bytes(8, "little") + data[: len(current) - 8])
        calls = 0
        sys.setprofile(note_call)
        try:
            parser.call(data)
        except parser.errors as failure:
            result["rejected"] += 1
            if number < len(seeds):
                return {**result, "bug": f"a valid input is rejected: {failure}"}
        except Exception:
            return {**result, "bug": traceback.format_exc()[-4000:]}
        finally:
            sys.setprofile(None)
        result.update(inputs=number + 1, most_calls=max(result["most_calls"], calls))
        if calls > CALLS:
            return {**result, "bug": f"{calls} calls for one input of {len(data)} bytes"}
        if number == count // 10:
            warm = _kept_bytes()
    growth = _kept_bytes() - warm
    result["growth_bytes"] = growth
    return {**result, "bug": f"memory grew by {growth} bytes"} if growth > GROWTH_BYTES else result


def _kept_bytes() -> int:
    """Resident memory, without what is free but not returned to the system yet."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _pages("resident")


def _pages(kind: str) -> int:
    size, resident = (int(word) * mmap.PAGESIZE for word in Path("/proc/self/statm").read_text().split()[:2])
    return resident if kind == "resident" else size


def run(parser: Parser, count: int, seed: int, out: Path) -> dict[str, Any]:
    """In a child with limits; a child that dies is a bug too. The input of a bug is kept in out."""
    current, (reader, writer) = mmap.mmap(-1, 2**20), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (_pages("size") + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(120 + count / 20),) * 2)  # a loop without end
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            os.write(writer, json.dumps(attack(parser, count, seed, current)).encode())
        except BaseException:
            os.write(writer, json.dumps({"parser": parser.name, "bug": traceback.format_exc()}).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    result: dict[str, Any] = (
        json.loads(text) if text else {"parser": parser.name, "bug": f"the process ended with status {status}"}
    )
    if "bug" in result:
        size = int.from_bytes(current[:8], "little")
        file = out / f"{parser.name.replace(' ', '-')}.{seed}"
        out.mkdir(parents=True, exist_ok=True)
        file.write_bytes(current[8 : 8 + size])
        result["input"] = str(file)
    return result


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("parsers", nargs="*", help="names; all by default")
    options.add_argument("--inputs", type=int, default=300_000, help="of all parsers together")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path("fuzz-bugs"), help="folder for the inputs of bugs")
    chosen = options.parse_args()
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()  # children leave what is loaded alone, instead of copying it
    parsers = [parser for parser in PARSERS if not chosen.parsers or parser.name in chosen.parsers]
    total, bugs = sum(parser.weight for parser in parsers), 0
    try:
        for parser in parsers:
            began_s = time.perf_counter()
            result = run(parser, round(chosen.inputs * parser.weight / total), chosen.seed, chosen.out)
            result["seconds"] = round(time.perf_counter() - began_s, 2)
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()
            bugs += "bug" in result
    finally:
        shutil.rmtree(folder(), ignore_errors=True)
    return 1 if bugs else 0


if __name__ == "__main__":
    sys.exit(main())
