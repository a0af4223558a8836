"""Recordings of a dataset, measured and located in a process of its own that can neither write nor connect.

    worker ──{"folder", "stations", "config", "power_dbm"}──▶ python -m brim.jobs.measuring, confined
           ◀──lines {"done", "total"}, then {"value"} or {"error"}──

A file that crashes its reader, or makes it too large or too slow, ends that process and fails the job with a sentence.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from brim.errors import BrimError, ConfigError, from_dict
from brim.jobs import sandbox
from brim.jobs.worker.process import die_with_parent

MEMORY_BYTES: Final = 8 * 1024**3
CPU_S: Final = 24 * 3600.0
STATIONS: Final = "stations.csv"  # of a dataset: where its stations are


def measure_confined(
    folder: Path, config: Mapping[str, Any], power_dbm: float | None, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Observations, GeoJSON and map page of a folder of recordings; progress may raise, which ends the process."""
    request = {"folder": str(folder), "config": dict(config), "power_dbm": power_dbm}
    with subprocess.Popen(
        [sys.executable, "-m", "brim.jobs.measuring"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.close()
            for line in process.stdout:
                answer = json.loads(line)
                if "value" in answer:
                    value: dict[str, Any] = answer["value"]
                    return value
                if "error" in answer:
                    raise _named(from_dict(answer["error"]), folder)
                progress(answer["done"], answer["total"])
        finally:
            process.kill()
    raise ConfigError("the recordings cannot be measured: reading them ended the process", hint="check the files")


def _named(error: BrimError, folder: Path) -> BrimError:
    """The error without where the dataset is."""
    error.message = error.message.replace(f"{folder}/", "")
    return error


def main() -> int:
    """In the process: confine, then measure."""
    die_with_parent()
    request = json.loads(sys.stdin.readline())
    from brim.config import read
    from brim.rf.location import collection, locate_documents, map_page
    from brim.rf.measurement import MeasureConfig, measure
    from brim.rf.recordings import read_sites

    sandbox.confine()
    sandbox.limit(MEMORY_BYTES, CPU_S)

    def tell(done: int, total: int) -> None:
        _write({"done": done, "total": total})

    try:
        folder = Path(request["folder"])
        sites = read_sites(folder / STATIONS) if (folder / STATIONS).is_file() else ()
        files = sorted(file for file in folder.iterdir() if file.name != STATIONS and file.suffix != ".sigmf-data")
        observation = measure(files, sites, read(MeasureConfig, request["config"]), progress=tell).observation.as_dict()
        located = locate_documents([("recordings", observation)], power_dbm=request["power_dbm"])
        value = {"observations": observation, "position": collection(located), "map": map_page(located)}
        reply: dict[str, Any] = {"value": value}
    except BrimError as error:
        reply = {"error": error.as_dict()}
    _write(reply)
    return 0


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
