"""Data in a tier inside a with block: the tier is chosen and filled when it begins, and given back when it ends."""

import logging
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Generic, Literal, Self

import torch

from brim.engine.config import Tier
from brim.engine.device.devices import describe, with_index
from brim.engine.device.memory import format_size, free_bytes
from brim.engine.rows.epoch import OpenEpochs
from brim.engine.rows.loading import Kept, first_that_fits
from brim.engine.rows.order import HOST, Choice, choose_tier
from brim.engine.training.ranks import Ranks

log = logging.getLogger("brim")


class Held(ABC, Generic[Kept]):
    """What Resident and RaggedResident have in common; they say how a tier is made."""

    def __init__(
        self,
        device: torch.device,
        tier: Tier | Literal["auto"],
        data_bytes: int,
        beside_bytes: int,
        reserve_bytes: int,
        ranks: Ranks | None = None,
    ) -> None:
        """Store; beside_bytes lie beside the data in its tier, reserve_bytes are left free on the device."""
        self._ranks = ranks
        self.device, self.bytes, self.load_s = with_index(device), data_bytes, 0.0
        self.opened = OpenEpochs()
        self._asked, self._beside_bytes, self._reserve_bytes = tier, beside_bytes, reserve_bytes
        self._preload_to_gpu: bool | None = None  # in tier "auto": True takes vram whenever it fits, False never
        self._held: tuple[Choice, Kept] | None = None

    def __enter__(self) -> Self:
        """Choose the tier and load."""
        if self._held is None:
            choice = self._choose()
            log.info("tier %s: %s%s%s", choice.tier, choice.why, self._say_order(choice.tier), self._say_more())
            began_s = time.perf_counter()
            self._held = first_that_fits(choice, self._make, self._say_order, self.device, self._ranks)
            self.load_s = time.perf_counter() - began_s
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop what is under way and give the memory back."""
        self.opened.cut(f"its {type(self).__name__} was closed")
        held, self._held = self._held, None
        if held is not None:
            held[1].close()

    def loaded(self) -> Kept:
        """The data in its tier; an error outside the with block."""
        return self._entered()[1]

    def _entered(self) -> tuple[Choice, Kept]:
        if self._held is None:
            raise RuntimeError(f"{type(self).__name__} holds its data inside its with block only")
        return self._held

    def _choose(self) -> Choice:
        if self._asked != "auto":
            return Choice(self._asked, f"{format_size(self.bytes)} of data, as asked for")
        return choose_tier(
            self.device,
            data_bytes=self.bytes + self._beside_bytes,
            reserve_bytes=self._reserve_bytes,
            device_free_bytes=free_bytes(self.device),
            host_free_bytes=free_bytes(HOST),
            preload_to_gpu=self._preload_to_gpu,
            device_name=str(describe(self.device)["name"]),
        )

    @abstractmethod
    def _make(self, tier: Tier) -> Kept:
        """The data in this tier, or OutOfMemory."""

    def _say_order(self, tier: Tier) -> str:
        """What this tier changes."""
        return ""

    def _say_more(self) -> str:
        """What else there is to say when loading begins."""
        return ""
