"""Power, utilisation and memory of a GPU from NVIDIA's management library, without torch.

A reading that a driver, a GPU or a container does not offer is None; NVML never makes anything fail.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any


def open_nvml() -> ModuleType | None:
    """The initialised library, or None if it is not available; close it with `close_nvml`."""
    try:
        import pynvml
    except ImportError:
        return None
    nvml: ModuleType = pynvml
    try:
        nvml.nvmlInit()
    except Exception:  # as in quietly
        return None
    return nvml


def close_nvml(nvml: ModuleType) -> None:
    quietly(lambda: nvml.nvmlShutdown())


def find_gpu(nvml: ModuleType, uuid: str | None) -> Any:
    """The handle of the GPU that torch gives this UUID; None where there is none.

    By UUID: NVML counts the GPUs of the machine, torch only those in CUDA_VISIBLE_DEVICES.
    """
    for prefix in ("GPU-", "MIG-"):
        name = f"{prefix}{uuid}"
        handle = quietly(lambda name=name: nvml.nvmlDeviceGetHandleByUUID(name))  # type: ignore[misc]
        if handle is not None:
            return handle
    return None


def quietly(read: Callable[[], Any]) -> Any:
    """Return a reading, or None where this driver, GPU or container does not offer it."""
    try:
        return read()
    except Exception:  # broad on purpose: a missing reading must not fail a run, whatever NVML raises
        return None
