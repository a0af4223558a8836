"""Drawn scenes as files: images, 16-bit label masks, and a page to look at.

DIR/images/nuclei_00000.png   DIR/masks/nuclei_00000.png   DIR/index.html
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from brim.errors import ConfigError, StorageError
from brim.report.page import card, document, tiles, write_page
from brim.segmentation.config import SCENES, SampleConfig
from brim.segmentation.objects.pictures import YELLOW, figure, figures, jpeg, outlined
from brim.segmentation.scenes.drawing import draw

SHOWN = 24  # images on the page
_BATCH = 64


def write_scenes(
    config: SampleConfig,
    out: Path,
    device: torch.device,
    *,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Draw the scenes and write them; kinds take turns. Returns counts, and stops after a batch if asked to."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("is not empty", field="out", value=str(out), code="occupied", hint="choose another {out}")
    kinds = tuple(dict.fromkeys(name for one in config.kind for name in (SCENES if one == "all" else (one,))))
    try:
        for folder in ("images", "masks"):
            (out / folder).mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise StorageError(f"{out}: cannot write, {failure.strerror or failure}; choose another") from failure
    batch = _BATCH if device.type == "cuda" else 2 * len(kinds)
    written, objects, shown = 0, 0, list[str]()
    for first in range(0, config.images, batch):
        numbers = range(first, min(first + batch, config.images))
        for place, kind in enumerate(kinds):
            mine = [number for number in numbers if number % len(kinds) == place]
            if not mine:
                continue
            index = torch.tensor(mine, dtype=torch.int32, device=device)
            scenes = draw((kind,), config.seed, index, config.size, config.size)
            pictures = scenes.images.permute(0, 2, 3, 1).cpu().numpy()
            for number, picture, labels in zip(mine, pictures, scenes.labels.cpu().numpy(), strict=True):
                values, numbered = np.unique(labels, return_inverse=True)
                label_image = (numbered.reshape(labels.shape) + int(values[0] != 0)).astype(np.uint16)
                objects += int(label_image.max())
                name = f"{kind}_{number:05d}.png"
                _write(out / "images" / name, picture[:, :, ::-1])
                _write(out / "masks" / name, label_image)
                if len(shown) < SHOWN:
                    shown.append(_figure(name, picture, label_image))
        written = numbers[-1] + 1
        if progress is not None:
            progress(written, config.images)
        if stop is not None and stop():
            break
    _write_page(out, config, kinds, written, objects, shown)
    return {"images": written, "objects": objects, "kinds": list(kinds), "out": str(out)}


def _write(file: Path, pixels: NDArray[Any]) -> None:
    if not cv2.imwrite(str(file), pixels):
        raise StorageError(f"{file}: cannot write; free some space or change the permissions")


def _figure(name: str, picture: NDArray[np.uint8], labels: NDArray[np.uint16]) -> str:
    """An image beside itself with the outlines of its objects, as HTML."""
    objects = int(labels.max())
    caption = f"{name}, {objects} object{'s' * (objects != 1)}"
    return figure(caption, jpeg([picture, outlined(picture, labels, YELLOW)]))


def _write_page(
    out: Path, config: SampleConfig, kinds: tuple[str, ...], written: int, objects: int, shown: list[str]
) -> None:
    numbers = [
        ("images", str(written), f"{config.size} × {config.size} pixels, seed {config.seed}"),
        ("objects", str(objects), f"{objects / max(1, written):.1f} per image"),
        ("kinds", str(len(kinds)), ", ".join(kinds)),
    ]
    note = "Left the image, right the same with the outlines of its objects, as the label masks number them."
    pictures = card("scenes", f"The first {len(shown)}", note, figures(shown))
    write_page(out / "index.html", document("Drawn scenes", f"<h1>Drawn scenes</h1>{tiles(numbers)}{pictures}"))
