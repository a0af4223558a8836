"""Your own network in the tuner: its fastest safe batch size on this device, beside that of a built-in network.

python examples/tune_network.py [FILE]     about ten seconds on two CPU cores; FILE keeps what was found
"""

import sys
from pathlib import Path

from torch import Tensor, nn

from brim.engine.device.devices import resolve_device
from brim.segmentation import TuneConfig, register_model, tune


class Shallow(nn.Module):
    """Depthwise and pointwise convolutions in turn: images (B, 3, H, W) to logits (B, 1, H, W)."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        """A 1 × 1 convolution in, `depth` pairs, a 1 × 1 convolution out."""
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 1)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Any height and width."""
        logits: Tensor = self.layers(images)
        return logits


def main(file: Path) -> None:
    """Tune both networks for images of 128 × 128 pixels and print what each batch size gave."""
    register_model("shallow", Shallow)
    device = resolve_device("auto")
    for name, found in tune(TuneConfig(models=("shallow", "unet_tiny"), size=128, seconds=3), device, out=file).items():
        entry = found.entry
        print(
            f"{name} on {device}: batch {entry.optimal_batch_size}, up to {entry.max_safe_batch_size} is safe, "
            f"{entry.expected_throughput:.0f} images/s, 95 % of the steps within {entry.p95_latency_ms:.1f} ms"
        )
        rates = {trial["batch"]: trial["throughput"] for trial in found.trials if trial["status"] == "ok"}
        print("  " + ", ".join(f"batch {batch}: {rates[batch]:.0f} images/s" for batch in sorted(rates)))
    print(f"kept in {file}: prediction and the service use it")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "batch_sizes.json"))
