"""Tune your own network next to a built-in one: the fastest safe batch size of each on this device.

python examples/tune_network.py [FILE]     about ten seconds on two CPU cores; results are saved in FILE
"""

import sys
from pathlib import Path

from torch import Tensor, nn

from brim.engine.device import resolve_device
from brim.segmentation import TuneConfig, register_model, tune


class Shallow(nn.Module):
    """Alternating depthwise and pointwise convolutions: images (B, 3, H, W) to logits (B, 1, H, W)."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        """A 1 × 1 convolution in, `depth` pairs, a 1 × 1 convolution out."""
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 1)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def main(file: Path) -> None:
    """Tune both networks for images of 128 × 128 pixels and print the throughput of each batch size."""
    register_model("shallow", Shallow)
    device = resolve_device("auto")
    config = TuneConfig(models=("shallow", "unet_tiny"), size=128, seconds=3)
    for name, tuned in tune(config, device, out=file).items():
        entry = tuned.entry
        print(
            f"{name} on {device}: batch {entry.optimal_batch_size}, up to {entry.max_safe_batch_size} is safe, "
            f"{entry.expected_throughput:.0f} images/s, 95 % of the steps within {entry.p95_latency_ms:.1f} ms"
        )
        rates = {trial["batch"]: trial["throughput"] for trial in tuned.trials if trial["status"] == "ok"}
        print("  " + ", ".join(f"batch {batch}: {rates[batch]:.0f} images/s" for batch in sorted(rates)))
    print(f"saved in {file}, which prediction and the service use")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "batch_sizes.json"))
