"""Register your own network, tune it for this device, train it on generated cells, and predict polygons.

python examples/segment_cells.py [DIR]     about fifteen seconds on two CPU cores; a second run only predicts
"""

import sys
from pathlib import Path

from torch import Tensor, nn

from brim.engine.device import resolve_device
from brim.segmentation import ModelLoader, SegmentTrainConfig, TuneConfig, register_model, train, tune
from brim.segmentation.scenes import make_cells, write_cells


class TwoScales(nn.Module):
    """Four convolutions, two of them at half the resolution: images (B, 3, H, W) to logits (B, 1, H, W)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = _conv(3, width)
        self.coarse = nn.Sequential(nn.MaxPool2d(2), _conv(width, width), _conv(width, width))
        self.score = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Accept any height and width: the coarse map is resized to the fine one."""
        fine = self.enter(images)
        coarse = nn.functional.interpolate(self.coarse(fine), size=fine.shape[2:], mode="bilinear")
        logits: Tensor = self.score(fine + coarse)
        return logits


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def main(out: Path) -> None:
    """Work in `out` and print the polygons of an unseen image."""
    register_model("two_scales", TwoScales)
    sizes, device = out / "batch_sizes.json", resolve_device("auto")
    if not (out / "run").exists():
        entry = tune(TuneConfig(models=("two_scales",), size=128, seconds=4), device, out=sizes)["two_scales"].entry
        print(f"batch {entry.optimal_batch_size}, up to {entry.max_safe_batch_size} is safe on {device}")
        write_cells(out / "images", out / "masks", count=16, seed=1, height=128, width=128)

    config = SegmentTrainConfig(model="two_scales", size=64, epochs=10, learning_rate=0.005)
    report = train(out / "images", out / "masks", config, out / "run")  # continues an existing run
    print(f"{report.epochs} epochs, Dice {report.dice:.3f} on held-out images")

    loader = ModelLoader(weights={"two_scales": out / "run"}, batch_sizes=sizes, tile=128)
    image, truth = make_cells(seed=2, index=5, height=128, width=128)
    prediction = loader.predict(image, "two_scales")
    covered = sum(polygon.area for polygon in prediction.polygons) / truth.size
    print(f"{len(prediction.polygons)} polygons cover {covered:.0%} of an unseen image; cells cover {truth.mean():.0%}")
    for polygon in sorted(prediction.polygons, key=lambda polygon: -polygon.area)[:5]:
        x, y = polygon.points.mean(0).round().astype(int).tolist()
        print(f"  near ({x}, {y}): {polygon.area:.0f} pixels, confidence {polygon.confidence:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "segment-example"))
