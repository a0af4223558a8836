"""What the benchmarks share: the machine in words, numbers and tables, and the page of results they fill."""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from brim import __version__
from brim.engine.device import describe, format_size, total_bytes

Json = dict[str, Any]


def tell(message: str) -> None:
    """A line of progress."""
    print(message, file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def machine(device: torch.device, commit: str) -> Json:
    """What the figures depend on."""
    facts = describe(device)
    return {
        "device": facts["name"],
        "device_bytes": facts["total_bytes"],
        "cores": facts["cores"],
        "host_bytes": total_bytes(torch.device("cpu")),
        "load_average": os.getloadavg()[0],
        "driver": driver_version() if device.type == "cuda" else None,
        "versions": {"brim": __version__, "python": platform.python_version(), "torch": torch.__version__}
        | {name: installed(name) for name in ("triton", "numpy")},
        "commit": commit or git_commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def driver_version() -> str | None:
    """The NVIDIA driver, where NVML says it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # broad on purpose: without NVML one word is missing, and no more
        return None


def installed(name: str) -> str | None:
    """The version of a package, if it is here."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """The commit measured, marked when files differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table in aligned columns, readable as it is and as Markdown."""
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    lines = [f"| {' | '.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))} |" for row in [header, *rows]]
    rule = f"| {' | '.join('-' * w for w in widths)} |"
    return "\n".join([f"## {title}", "", lines[0], rule, *lines[1:], ""])


def number(value: float) -> str:
    """Three digits or more, thousands apart."""
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 else f"{value:.3g}"


def ranged(values: dict[str, float]) -> str:
    """Median and range in words."""
    return f"{number(values['median'])} ({number(values['min'])}–{number(values['max'])})"


def facts_of(results: Json, more_versions: Mapping[str, str | None]) -> list[str]:
    """The list above the tables: machine, load, versions, commit, command."""
    here = results["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in {**here["versions"], **more_versions}.items() if v)
    threads = f", {here['threads']} threads" if "threads" in here else ""
    driver = f", driver {here['driver']}" if here["driver"] else ""
    memory = f"{format_size(here['device_bytes'])}, host {format_size(here['host_bytes'])}"
    ended = f", when it ended: {results['load_average_end']:.2f}" if "load_average_end" in results else ""
    return [
        f"- machine: {here['device']}, {here['cores']} cores{threads}, memory {memory}{driver}",
        f"- load average when it began: {here['load_average']:.2f}{ended}",
        f"- versions: {versions}",
        f"- commit: {here['commit'] or 'unknown'}, {here['date']}",
        f"- command: `{results['command']}`",
    ]


def markdown(question: str, about: str, facts: Sequence[str], tables: str, line: str) -> str:
    """A page of results: the question's first line as its title, the JSON line at its end."""
    title = "# " + question.splitlines()[0]
    return "\n".join([title, "", about, "", *facts, "", tables, "```json", line, "```", ""])
