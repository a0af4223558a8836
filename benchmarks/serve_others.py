"""The same network behind other servers: LitServe, mosec and Ray Serve; what bench_serve.py compares with.

    BRIM_BENCH_SETTING=setting.json python benchmarks/serve_litserve.py     or serve_mosec.py, serve_ray.py

All of them run brim's own steps: the same decoder, the same Network in the setting that tuning chose, the same tracing,
the same GeoJSON; only the serving differs. Each is used as its documentation says: LitServe collects batches in its
loop and works on a batch's images in threads, mosec has processes for decoding and tracing and shared memory between
its stages, Ray Serve collects batches in a replica. All run one copy of the network and are told the same limits: the
largest batch, the longest wait for one and the time after which an answer is of no use.
"""

import json
import os
import pickle
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch

from brim.segmentation import ModelLoader
from brim.segmentation.images.reading import read_image
from brim.segmentation.networks import CAPTURE_AFTER
from brim.segmentation.objects import geojson
from brim.segmentation.objects.rings import trace

Json = dict[str, Any]
SETTING = "BRIM_BENCH_SETTING"  # the path of the setting: servers start processes of their own
SHARED = Path("/dev/shm")


class Steps:
    """What every server does with an image."""

    def __init__(self, setting: Json) -> None:
        if setting["cores"]:
            os.sched_setaffinity(0, setting["cores"])
        self.setting = setting
        self._network: Any = None
        self._on_gpu = False

    def load(self) -> None:
        """The network on its device, warm in every size of batch."""
        setting = self.setting
        loader = ModelLoader({setting["network"]: setting["weights"]}, setting["device"], setting["batch_sizes"])
        self._network = loader.load(setting["network"])
        self._on_gpu = self._network.device.type == "cuda"
        blank = np.zeros((setting["size"], setting["size"], 3), np.uint8)
        for batch in range(1, setting["batch_size"] + 1):
            for _ in range(CAPTURE_AFTER + 1 if self._on_gpu and batch == self._padded(batch) else 1):
                self.forward([blank] * batch)

    def _padded(self, batch: int) -> int:
        """On a GPU the next power of two, or the largest: a few graphs serve all sizes, as in brim."""
        if not self._on_gpu:
            return batch
        return min(int(self.setting["batch_size"]), 1 << (batch - 1).bit_length())

    def decode(self, data: bytes) -> np.ndarray:
        """Bytes of a file → (H, W, 3) uint8."""
        return read_image(data)

    def forward(self, images: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Masks (H, W) uint8 and probabilities (H, W) float32 of a batch."""
        shape = (self._padded(len(images)), *images[0].shape)
        batch = torch.empty(shape, dtype=torch.uint8, pin_memory=self._on_gpu)
        for row, image in enumerate(images):
            batch[row].numpy()[:] = image
        with torch.inference_mode():
            pixels = batch.to(self._network.device, non_blocking=True).permute(0, 3, 1, 2)
            probability = torch.sigmoid(self._network(pixels)[: len(images), 0])
            mask = (probability > 0.5).to(torch.uint8) * 255
            masks, probabilities = (self._downloaded(tensor) for tensor in (mask, probability))
            if self._on_gpu:
                torch.cuda.current_stream().synchronize()
        return [(masks[row], probabilities[row]) for row in range(len(images))]

    def _downloaded(self, tensor: torch.Tensor) -> np.ndarray:
        """On its way to the host, through pinned memory from a GPU."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu)
        return host.copy_(tensor, non_blocking=True).numpy()

    def finish(self, found: tuple[np.ndarray, np.ndarray]) -> bytes:
        """Polygons as GeoJSON."""
        return geojson(trace(*found))


def read_setting() -> Json:
    """What this process was told."""
    found: Json = json.loads(Path(os.environ[SETTING]).read_text())
    return found


def to_shared(value: Any) -> bytes:
    """A value between two stages: arrays go through shared memory, and only their place through the socket."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    name = SHARED / f"brim-bench-{uuid.uuid4().hex}"
    views = [buffer.raw() for buffer in buffers]
    with name.open("wb") as file:
        file.writelines(views)
    return pickle.dumps((head, str(name), [len(view) for view in views]))


def from_shared(data: bytes) -> Any:
    """The value again; its place is given back."""
    head, name, lengths = pickle.loads(data)
    whole = np.fromfile(name, np.uint8).data  # memory of its own: the arrays may be written
    Path(name).unlink()
    ends = np.cumsum([0, *lengths]).tolist()
    return pickle.loads(head, buffers=[whole[ends[k] : ends[k + 1]] for k in range(len(lengths))])
