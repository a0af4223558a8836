"""How many images a second become outlined cells, and what share of the network's own speed is that?

Images of drawn nuclei, about 400 cells on 1024², through the default model:
1. forward: the network on a batch that stays on the device;
2. + instances: labels from its maps;
3. + contours: outlines and measurements of the labels;
4. + files: `brim segment predict`'s own way, from image files to GeoJSON files.

The steps 1 to 3 run one after the other on the device; 4 overlaps them with reading and writing.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import torch
from torch import Tensor

from brim.engine.device import resolve_device
from brim.segmentation import ModelLoader
from brim.segmentation.config import DEFAULT_NETWORK, FilesConfig
from brim.segmentation.networks import InferenceNetwork, default_setting, default_weights, load_model, traits_of
from brim.segmentation.objects.instances import to_labels
from brim.segmentation.objects.measuring import find_objects
from brim.segmentation.prediction import predict_files
from brim.segmentation.scenes.drawing import draw
from page import Json, machine, table, tell

BARS = {"cuda": {"images_per_s": 300.0, "share": 0.8}, "cpu": {"images_per_s": 1.5, "share": 0.0}}


def main() -> None:
    options = parse_options()
    device = resolve_device(options.device)
    size = options.size or (1024 if device.type == "cuda" else 512)
    images = options.images or (1024 if device.type == "cuda" else 8)
    batch = options.batch or (16 if device.type == "cuda" else 1)
    tell(f"drawing {size}²")
    scenes = draw(("nuclei",), 7, torch.arange(max(16, batch), dtype=torch.int32, device=device), size, size)
    steps = on_device(device, scenes.images[:batch].contiguous(), options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        files = end_to_end(device, scenes.images, images, batch, Path(folder))
    results: Json = {
        "question": "images per second of the default model, to outlined cells in files",
        "machine": machine(device, options.commit),
        "size": size,
        "batch": batch,
        "cells_per_image": float((scenes.labels.flatten(1).amax(1)).float().mean()),
        "steps": steps,
        "files": files,
        "share_of_forward": files["images_per_s"] / steps["forward"],
    }
    bars = BARS[device.type]
    met = files["images_per_s"] >= bars["images_per_s"] and results["share_of_forward"] >= bars["share"]
    results["meets_the_bar"] = met
    print(render(results), json.dumps(results), sep="\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", type=int, help="side of the images in pixels; 1024 on a GPU, 512 on a CPU")
    parser.add_argument("--images", type=int, help="files of the last step")
    parser.add_argument("--batch", type=int, help="images of a batch; 16 on a GPU, 1 on a CPU")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured for each step")
    parser.add_argument("--commit", default="")
    return parser.parse_args()


def on_device(device: torch.device, images: Tensor, seconds: float) -> dict[str, float]:
    """Images/s of the forward, and with each further step."""
    weights = default_weights()
    network = InferenceNetwork(
        load_model(DEFAULT_NETWORK, weights), device, default_setting(device), traits=traits_of(weights)
    )

    def forward() -> Tensor:
        return torch.sigmoid(network(images)[:, :2])

    def instances() -> tuple[Tensor, Tensor]:
        maps = forward()
        return maps, to_labels(maps[:, 0], maps[:, 1])

    def contours() -> None:
        maps, labels = instances()
        find_objects(labels, maps[:, 0], images)

    steps: dict[str, Callable[[], object]] = {"forward": forward, "instances": instances, "contours": contours}
    rates = {}
    with torch.inference_mode():
        for name, step in steps.items():
            tell(name)
            rates[name] = len(images) * rate_of(step, device, seconds)
    return rates


def rate_of(step: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Calls per second, after three that do not count."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        step()
    wait()
    calls, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        step()
        calls += 1
        if calls % 4 == 0:
            wait()
    wait()
    return calls / (time.perf_counter() - began_s)


def end_to_end(device: torch.device, images: Tensor, num: int, batch: int, folder: Path) -> Json:
    """The stream of `predict`, from TIFF files to GeoJSON files."""
    tell("files")
    (folder / "images").mkdir()
    for number, image in enumerate(images.permute(0, 2, 3, 1).cpu().numpy()):
        cv2.imwrite(str(folder / f"{number}.tif"), image[..., ::-1], [cv2.IMWRITE_TIFF_COMPRESSION, 1])
    for number in range(num):
        (folder / "images" / f"{number:05d}.tif").hardlink_to(folder / f"{number % len(images)}.tif")
    loader = ModelLoader({DEFAULT_NETWORK: default_weights()}, device, None)
    config = FilesConfig(model=DEFAULT_NETWORK, strict=False, batch_size=1 if device.type == "cpu" else batch)
    predict_files(sorted((folder / "images").iterdir())[: 2 * batch], loader, folder / "first", config)
    found = predict_files([folder / "images"], loader, folder / "out", config)
    report = found.report
    assert report is not None
    return {
        "images": report.images,
        "cells": report.polygons,
        "images_per_s": report.images_per_s,
        "ceiling_share": report.ceiling_share,
        "busy_s": {name: round(stage["busy_s"], 3) for name, stage in report.stages.items() if name != "gpu"},
    }


def render(results: Json) -> str:
    forward = results["steps"]["forward"]
    rows = [[name, f"{rate:.4g}", f"{rate / forward:.0%}"] for name, rate in results["steps"].items()]
    rows.append(["files", f"{results['files']['images_per_s']:.4g}", f"{results['share_of_forward']:.0%}"])
    title = f"{results['size']}², {results['cells_per_image']:.0f} cells, batch {results['batch']}"
    return table(title, ["step", "images/s", "of the forward"], rows)


if __name__ == "__main__":
    main()
