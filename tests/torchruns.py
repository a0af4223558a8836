"""Real ranks for tests: torchrun on this machine, and what a run left to compare."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]
STEPS = Path(__file__).with_name("brim_steps.py")  # brim, that logs every step and may die


def torchrun(*args: str | Path, ranks: int = 2, restarts: int = 0, **environment: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ranks that run a script or "-m" a module."""
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    return run(["-m", "torch.distributed.run", *options, *map(str, args)], environment)


def alone(*args: str | Path, **environment: str) -> tuple[int, str, str]:
    """The same of one process."""
    return run([str(arg) for arg in args], environment)


def run(args: list[str], environment: dict[str, str], timeout_s: float = PATIENCE_S) -> tuple[int, str, str]:
    """Run Python; whatever happens, nothing of it is left."""
    whole = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        [sys.executable, *args], env=whole, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # torchrun ends its ranks
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=PATIENCE_S)
            process.kill()
    return process.returncode, out, err


def logged(folder: Path, name: str = "loss") -> dict[int, float]:
    """One of the values in a phase's metrics.jsonl, by step."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def differences(first: Path, second: Path, name: str = "loss") -> float:
    """The greatest difference of two runs' values; they must have them at the same steps."""
    one, two = logged(first, name), logged(second, name)
    assert one, f"{first} logged no {name}"
    assert one.keys() == two.keys()
    return max(abs(one[step] - two[step]) for step in one)
