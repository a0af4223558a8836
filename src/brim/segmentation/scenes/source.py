"""Drawn scenes as training data: batches of numbers, from which the step draws its images on the device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from brim.engine.training import Batch, BatchSource
from brim.segmentation.images.contrast import stretch_batch
from brim.segmentation.scenes.drawing import DrawnScenes, draw, most_places
from brim.segmentation.scenes.kinds import kinds_of


class SceneSource(BatchSource):
    """Numbers of scenes, no two alike: epoch by epoch from 0 on."""

    def __init__(self, num_scenes: int, batch_size: int, device: torch.device) -> None:
        """num_scenes of an epoch; the last batch is full, as a few more can always be drawn."""
        self.batch_size = min(batch_size, num_scenes)
        self.num_batches = -(-num_scenes // self.batch_size)
        self.num_items = self.num_batches * self.batch_size
        self._device = device

    @property
    def tier(self) -> str:
        return "drawn"

    def epoch(self, number: int, start_batch: int = 0) -> Iterator[Batch]:
        place = torch.arange(self.batch_size, dtype=torch.int32, device=self._device)
        for batch in range(start_batch, self.num_batches):
            yield {"index": place + (number * self.num_items + batch * self.batch_size)}


class Drawing:
    """Scenes of a size by their numbers, every second one with its contrast stretched as that of a whole image is."""

    def __init__(self, names: tuple[str, ...], seed: int, size: int) -> None:
        self._kinds, self._seed, self._size = kinds_of(names), seed, size
        self.most = most_places(self._kinds, size, size) + 1  # objects in a scene

    @torch.no_grad()
    def __call__(self, index: Tensor) -> DrawnScenes:
        """index (B,) int32."""
        with torch.autocast(index.device.type, enabled=False):
            scenes = draw(self._kinds, self._seed, index, self._size, self._size)
            plain = (index % 2 == 0).view(-1, 1, 1, 1)
            return DrawnScenes(torch.where(plain, scenes.images, stretch_batch(scenes.images)), scenes.labels)
