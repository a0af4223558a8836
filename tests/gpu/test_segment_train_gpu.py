"""Networks trained to segment on a GPU: captured steps, every tier, and masks that come out right."""

import numpy as np
import pytest
import torch

from brim.engine.device.devices import stream
from brim.segmentation.config import CropAugmentation, SegmentTrainConfig
from brim.segmentation.networks import InferenceNetwork, create_model, default_setting, load_weights
from brim.segmentation.scenes import make_cells, write_cells
from brim.segmentation.training import augment, train
from brim.segmentation.training.objective import PixelCounts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    write_cells(folder / "images", folder / "masks", 24, seed=1, height=128, width=160)
    return folder


def run(cells, out, **changes):
    options = {"model": "unet_tiny", "size": 64, "epochs": 6, "batch_size": 8, "learning_rate": 0.003} | changes
    return train(cells / "images", cells / "masks", SegmentTrainConfig(**options), out, device="cuda")


@pytest.mark.parametrize("precision", ["auto", "fp16", "fp32"])
@pytest.mark.parametrize("tier", ["vram", "ram", "window"])
def test_every_tier_and_precision_learns_to_segment(cells, tmp_path, tier, precision):
    report = run(cells, tmp_path / "run", tier=tier, precision=precision)

    assert (report.training.tier, report.training.step_kind) == (tier, "graph")
    module = create_model("unet_tiny")
    load_weights(module, tmp_path / "run")
    network = InferenceNetwork(module, CUDA, default_setting(CUDA))
    held = [make_cells(99, index, 192, 256) for index in range(6)]
    images = torch.from_numpy(np.stack([image for image, _ in held])).permute(0, 3, 1, 2).to(CUDA)
    true = torch.from_numpy(np.stack([mask for _, mask in held]))[:, None].to(CUDA)
    scores = PixelCounts(len(held), CUDA)
    scores.add(network(images) > 0, true, torch.arange(len(held), device=CUDA))
    assert scores.result()["iou"] >= 0.8


@pytest.mark.parametrize("model", ["hrnet", "resunet_small", "resunet_advanced"])
def test_the_large_networks_train_in_captured_steps(cells, tmp_path, model):
    report = run(cells, tmp_path / "run", model=model, epochs=1, batch_size=4)

    assert report.training.step_kind == "graph"
    assert 0 <= report.iou <= report.dice <= 1


def test_image_and_mask_move_together_on_the_device():
    masks = torch.zeros(16, 1, 96, 96, dtype=torch.uint8, device=CUDA)
    masks[:, :, 20:50, 30:80] = 1
    config = CropAugmentation(brightness=0, contrast=0, gamma=0, noise=0)

    images, moved = augment(masks.expand(-1, 3, -1, -1) * 255, masks, stream(0, "test", device=CUDA), config)

    assert ((images[:, :1] > 127) != (moved > 0)).float().mean() < 0.01
    assert not torch.equal(moved, masks)
