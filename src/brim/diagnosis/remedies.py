"""Which changes are worth a run of their own, given what was found."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from brim.diagnosis.answer import Diagnosis


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change to the script, as its probe knows it and as a reader does."""

    change: str
    value: Any
    words: str
    compares_loss: bool = True
    impossible: str = ""  # why it is not tried


def remedies(answer: Diagnosis, result: Mapping[str, Any], tries: Sequence[str] | None) -> list[Remedy]:
    """The changes to measure, the most promising first."""
    on_gpu = (result.get("device") or {}).get("type") == "cuda"
    groups = {
        "data": _data(answer, result, on_gpu),
        "batch": [_batch(answer, factor) for factor in (2, 4)],
        "precision": [Remedy("bf16", None, "bf16"), Remedy("channels_last", None, "channels_last")],
        "compile": [Remedy("compile", "reduce-overhead" if on_gpu else None, "torch.compile")],
    }
    if tries is not None:
        return [remedy for name in tries for remedy in groups[name]]
    chosen = {
        "data": ["data"],
        "copy": ["data"],
        "launch": ["batch", "compile"],
        "compute": ["precision", "compile"],
    }
    return [remedy for name in chosen.get(answer.limit or "", []) for remedy in groups[name] if not remedy.impossible]


def _data(answer: Diagnosis, result: Mapping[str, Any], on_gpu: bool) -> list[Remedy]:
    loader, cores = answer.loader, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    why = "" if loader else "the script has no DataLoader"
    num = max(2, cores or 1)
    workers = Remedy("workers", num, f"num_workers={num}", impossible=why)
    if loader and loader["iterable"]:
        workers = Remedy("workers", num, workers.words, impossible="workers of an IterableDataset may repeat its rows")
    elif loader and loader["num_workers"] >= num:
        workers = Remedy("prefetch", 8, "prefetch_factor=8, persistent_workers=True")
    changes = [workers, Remedy("resident", None, _resident_words(answer, result, on_gpu), impossible=why)]
    if on_gpu and loader and not loader["pin_memory"]:
        changes.insert(1, Remedy("pinned", True, "pin_memory=True"))
    return changes


def _resident_words(answer: Diagnosis, result: Mapping[str, Any], on_gpu: bool) -> str:
    """With the size of the whole dataset, where its length is known."""
    loader, place = answer.loader or {}, "VRAM" if on_gpu else "memory"
    if not loader.get("rows") or not loader.get("row_bytes"):
        return f"data in {place} (brim.Resident)"
    total = (result.get("device") or {}).get("memory")
    of = f" of {total / 1e9:.3g}" if total else ""
    return f"data in {place} with brim.Resident ({loader['rows'] * loader['row_bytes'] / 1e9:.3g}{of} GB)"


def _batch(answer: Diagnosis, factor: int) -> Remedy:
    loader = answer.loader
    size = f" ({loader['largest'] * factor})" if loader else ""
    why = "" if loader else "the script has no DataLoader"
    return Remedy("batch", factor, f"batch size × {factor}{size}", compares_loss=False, impossible=why)
