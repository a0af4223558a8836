"""What `brim doctor` reports: versions, devices, memory, disk, what brim will use, and problems with their fixes.

It never fails: what cannot be read is left out, and the report says so.
"""

import importlib.metadata
import os
import platform
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim import __version__

if TYPE_CHECKING:
    from rich.table import Table

PACKAGES = (
    *("torch", "triton", "numpy", "safetensors", "nvidia-ml-py", "pyarrow", "h5py", "matplotlib", "onnx"),
    *("dbos", "fastapi", "nicegui", "ray", "fsspec", "s3fs"),
)
OPTIONAL = {  # feature → the extra it needs, and the packages of that extra
    "parquet export": ("export", ("pyarrow",)),
    "hdf5 export": ("export", ("h5py",)),
    "drawing with --plot": ("plot", ("matplotlib",)),
    "brim rf export-onnx": ("onnx", ("onnx",)),
    "the service, brim serve,": ("service", ("dbos", "fastapi", "nicegui")),
    "clusters and object stores": ("cluster", ("ray", "fsspec", "s3fs")),
}
LOW_DISK_BYTES = 2 * 1024**3
LOW_MEMORY_BYTES = 1024**3
LOW_SHARED_BYTES = 256 * 1024**2  # containers have 64 MiB by default
SHARED = Path("/dev/shm")  # processes that read a folder of sequences pass batches through it
NVIDIA = Path("/proc/driver/nvidia/version")  # exists once the kernel has loaded the driver


def collect(cluster: str | None = None) -> dict[str, Any]:
    """The whole report as JSON-able values; cluster is the address of a Ray cluster to check too."""
    cuda = _cuda()
    facts: dict[str, Any] = {
        "brim": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _attempt(_cpu),
        "cuda": cuda,
        "nvml": _attempt(_nvml) or {"works": False, "driver": None, "num_devices": 0},
        "triton": _triton(bool(cuda["devices"])),
        "disk": _attempt(_disk),
        "shared_memory": _attempt(_shared_memory),
        "sandbox": _attempt(_sandbox).get("walls", []),
        "uses": _attempt(_uses),
    }
    facts["problems"] = _problems(facts)
    if cluster is not None:
        facts["cluster"] = _cluster(cluster)
        facts["problems"] += facts["cluster"].pop("problems")
    return facts


def _sandbox() -> dict[str, Any]:
    """What the kernel takes from processes that parse untrusted files."""
    from brim.jobs.sandbox import available

    return {"walls": available()}


def num_gpus() -> int:
    """The number of NVIDIA GPUs, without importing torch."""
    return int(_attempt(_nvml).get("num_devices", 0))


def render(facts: dict[str, Any]) -> "Table":
    """The report as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _rows(facts):
        table.add_row(Text(name, style="bold"), Text(value))
    for problem in facts["problems"]:
        table.add_row(Text("problem", style="bold red"), Text(f"{problem['problem']}; {problem['fix']}"))
    if not facts["problems"]:
        table.add_row(Text("problems", style="bold"), Text("none"))
    return table


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, disk, uses = facts["cpu"], facts["disk"], facts["uses"]
    rows = [
        ("brim", f"{facts['brim']}, Python {facts['python']}, {facts['system']}"),
        ("packages", _versions(facts["packages"])),
        ("CPU", f"{cpu.get('name', 'unknown')}, {cpu.get('cores', '?')} usable cores"),
        ("memory", _free_of(cpu)),
    ]
    for gpu in facts["cuda"]["devices"]:
        text = f"{gpu['name']}, {_free_of(gpu)}, compute capability {gpu['compute_capability']}"
        rows.append((gpu["device"], text))
    if not facts["cuda"]["devices"]:
        rows.append(("GPU", facts["cuda"]["reason"]))
    nvml = facts["nvml"]
    rows += [
        (
            "NVML",
            f"works, driver {nvml['driver']}" if nvml["works"] else "not available: no power or utilisation figures",
        ),
        ("Triton", facts["triton"]["reason"]),
        ("disk", f"{_free_of(disk)} in {disk.get('path', '.')}"),
        ("shared memory", f"{_free_of(facts['shared_memory'])} in {SHARED}"),
        ("sandbox", ", ".join(facts["sandbox"]) or "none: files are parsed with limits of memory and time only"),
        ("uses", f"{uses.get('device', 'unknown')}; {uses.get('batch_size', 'unknown')}"),
    ]
    return [*rows, *(_cluster_rows(facts["cluster"]) if "cluster" in facts else ())]


def _cluster_rows(cluster: dict[str, Any]) -> list[tuple[str, str]]:
    """Nodes, then ports: who can connect, and whether they accept requests without a token."""
    rows = []
    for node in cluster["nodes"]:
        devices = f"{node['gpus']:g} GPUs, {node['cpus']:g} CPUs, {_gib(node['free_bytes'])} of memory free"
        rows.append(("node", f"{node['host']}: {devices}, {_versions(node['versions'])}"))
    rows += [("port", f"{one['program']} {one['port']}, reached from: {one['reach']}") for one in cluster["ports"]]
    verbs = {
        "refuses": "rejects",
        "open": "ACCEPTS",
        "no answer": "does not answer",
        "unknown": "cannot be tested with",
    }
    for one in cluster["without_token"]:
        text = f"{one['program']} at {one['host']} {one['port']} {verbs[one['answer']]} requests without one"
        rows.append(("token", text))
    return rows or [("cluster", "none found")]


def _versions(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'absent'}" for name, version in packages.items())


def _free_of(facts: dict[str, Any]) -> str:
    if "free_bytes" not in facts:
        return "unknown"
    return f"{_gib(facts['free_bytes'])} free of {_gib(facts['total_bytes'])}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.1f} GiB"


# Reading


def _attempt(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read()
    except Exception:  # broad on purpose: a report without this part is better than none
        return {}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    import torch

    from brim.engine.device import describe

    facts = describe(torch.device("cpu"))
    return {name: facts[name] for name in ("name", "cores", "total_bytes", "free_bytes")}


def _cuda() -> dict[str, Any]:
    """The CUDA devices torch can use, or why there are none."""
    none: dict[str, Any] = {"version": None, "devices": []}
    try:
        import torch

        from brim.engine.device import describe
    except Exception as failure:
        return {**none, "reason": f"PyTorch cannot be imported: {failure}"}
    version = torch.version.cuda
    if version is None:
        return {**none, "reason": "none used: PyTorch is built without CUDA"}
    try:
        if not torch.cuda.is_available():
            return {**none, "version": version, "reason": "none found"}
        devices = [describe(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    except Exception as failure:
        return {**none, "version": version, "reason": f"cannot be used: {_first_line(failure)}"}
    return {"version": version, "devices": devices, "reason": ""}


def _nvml() -> dict[str, Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        return {
            "works": True,
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "num_devices": pynvml.nvmlDeviceGetCount(),
        }
    finally:
        pynvml.nvmlShutdown()


def _triton(has_gpu: bool) -> dict[str, Any]:
    """Whether a Triton kernel compiles and runs; only a GPU needs it."""
    if not has_gpu:
        return {"works": False, "reason": "not needed without a GPU"}
    try:
        _run_kernel()
    except Exception as failure:
        return {"works": False, "reason": f"does not work: {_first_line(failure)}"}
    return {"works": True, "reason": "compiles and runs a kernel"}


def _run_kernel() -> None:
    import torch
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def double(values, size: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
        addresses = values + tl.arange(0, size)
        tl.store(addresses, 2 * tl.load(addresses))

    values = torch.ones(16, device=torch.device("cuda", 0))
    double[(1,)](values, 16)
    if values.tolist() != [2.0] * 16:
        raise RuntimeError("a kernel gave a wrong result")


def _disk() -> dict[str, Any]:
    usage = shutil.disk_usage(Path.cwd())
    return {"path": str(Path.cwd()), "free_bytes": usage.free, "total_bytes": usage.total}


def _shared_memory() -> dict[str, Any]:
    usage = shutil.disk_usage(SHARED)
    return {"free_bytes": usage.free, "total_bytes": usage.total}


def _uses() -> dict[str, Any]:
    from brim.engine.device import resolve_device, worker_count

    device = resolve_device("auto")
    if device.type == "cuda":
        why = "batch size from the GPU's free memory and a measured batch"
    else:
        why = f"batch size from free memory, at most two samples for each of {worker_count()} cores"
    return {"device": str(device), "batch_size": f"{why}; --batch-size and --memory override it"}


def _cluster(address: str) -> dict[str, Any]:
    from brim.errors import ConfigError

    none: dict[str, Any] = {"address": address, "nodes": [], "ports": [], "without_token": []}
    try:
        from brim.cluster import survey

        return survey(address)
    except ConfigError:  # not an address: the user's mistake
        raise
    except Exception as failure:
        problem = {"problem": f"the cluster cannot be checked: {_first_line(failure)}", "fix": "see: ray status"}
        return {**none, "problems": [problem]}


def _first_line(failure: BaseException) -> str:
    return (str(failure).strip() or type(failure).__name__).splitlines()[0]


# Problems and their fixes

_TORCH_PAGE = "https://pytorch.org/get-started"


def _problems(facts: dict[str, Any]) -> list[dict[str, str]]:
    pairs = [*_device_problems(facts), *_space_problems(facts), *_data_problems(), *_missing(facts["packages"])]
    return [{"problem": problem, "fix": fix} for problem, fix in pairs]


def _device_problems(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    cuda, nvml, hidden = facts["cuda"], facts["nvml"], os.environ.get("CUDA_VISIBLE_DEVICES")
    if not facts["uses"]:
        yield cuda["reason"], f"install it again: {_TORCH_PAGE}"
    elif not cuda["devices"] and nvml.get("num_devices"):
        if cuda["version"] is None:
            yield "there is a GPU, but PyTorch is built without CUDA", f"install a CUDA build: {_TORCH_PAGE}"
        elif hidden is not None:
            yield f'CUDA_VISIBLE_DEVICES="{hidden}" hides every GPU', "unset it to use them"
        else:
            fix = f"driver {nvml['driver']} may be older than CUDA {cuda['version']} needs: update the driver"
            yield f"there is a GPU, but PyTorch cannot use it ({cuda['reason']})", fix
    if not nvml.get("works") and NVIDIA.is_file():
        fix = "nvidia-smi must list it: update or reinstall the driver, or restart; a container needs --gpus all"
        yield "the NVIDIA driver is loaded, but does not answer", fix
    if cuda["devices"] and not facts["triton"]["works"]:
        yield f"Triton {facts['triton']['reason']}", "install it and a C compiler: pip install triton"


def _space_problems(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    disk, memory, shared = (facts[name].get("free_bytes") for name in ("disk", "cpu", "shared_memory"))
    if disk is not None and disk < LOW_DISK_BYTES:
        fix = "free some, or give --out, and --data of brim serve, on another disk"
        yield f"only {_gib(disk)} of disk is free here", fix
    if memory is not None and memory < LOW_MEMORY_BYTES:
        yield f"only {_gib(memory)} of memory is free", "close other programs or give --memory"
    if shared is not None and shared < LOW_SHARED_BYTES:
        fix = "remount it with size=2G, give a container --shm-size=2g, or --num-workers 0 to brim sequence train"
        yield f"only {shared / 1024**2:.0f} MiB of shared memory is free in {SHARED}", fix


def _data_problems() -> Iterator[tuple[str, str]]:
    """The data directory that a service started here would use."""
    from brim.service.settings import data_folder, open_to_others

    data = data_folder(None)
    if problem := open_to_others(data):
        yield problem, f"chmod 700 {shlex.quote(str(data))}"


def _missing(packages: dict[str, str | None]) -> Iterator[tuple[str, str]]:
    for feature, (extra, needed) in OPTIONAL.items():
        absent = [name for name in needed if packages[name] is None]
        if absent:
            verb = "is" if len(absent) == 1 else "are"
            yield f"{', '.join(absent)} {verb} absent, so {feature} is off", f'pip install "brim[{extra}]"'
