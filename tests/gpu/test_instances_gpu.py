"""Instances on a GPU: labels, outlines and measurements are those of the CPU, and so are predicted cells."""

import pytest
import torch

from brim.segmentation import ModelLoader
from brim.segmentation.config import FilesConfig
from brim.segmentation.networks import default_weights
from brim.segmentation.objects.instances import find_instances, heights
from brim.segmentation.objects.measuring import find_objects
from brim.segmentation.objects.scores import ObjectScores
from brim.segmentation.scenes.drawing import draw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("noise", [0.0, 0.05, 1.0])
def test_labels_and_objects_are_those_of_the_cpu(noise):
    scenes = draw(("nuclei", "cytoplasm"), 3, torch.arange(4, dtype=torch.int32), 300, 260)
    rng = torch.Generator().manual_seed(0)
    height = heights(scenes.labels, 10_000) + noise * torch.rand(scenes.labels.shape, generator=rng)
    foreground = 0.9 * (scenes.labels > 0) + 0.1 * torch.rand(scenes.labels.shape, generator=rng)

    here = find_instances(foreground, height, threshold=0.5, min_area=8)
    there = find_instances(foreground.to(CUDA), height.to(CUDA), threshold=0.5, min_area=8)

    assert all(torch.equal(part.cpu(), wanted) for part, wanted in zip(there, here, strict=True))
    wanted = find_objects(here.labels, foreground, scenes.images)
    found = find_objects(there.labels, foreground.to(CUDA), scenes.images.to(CUDA))
    assert torch.equal(found.labels.cpu(), wanted.labels)
    assert torch.equal(found.owner.cpu(), wanted.owner)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found.rings, wanted.rings, strict=True))
    torch.testing.assert_close(found.table.cpu(), wanted.table, rtol=1e-6, atol=1e-9)  # perimeters are sums of float32


def test_predicted_cells_are_those_of_the_cpu(tmp_path):
    scenes = draw(("nuclei",), 5, torch.arange(6, dtype=torch.int32), 256, 320)
    images = list(scenes.images.permute(0, 2, 3, 1).contiguous().numpy())
    images.append(images[0].repeat(4, 0).repeat(4, 1))  # seen at another scale, and in windows
    config, weights = FilesConfig(batch_size=2), {"cells": default_weights()}

    here = list(ModelLoader(weights, "cpu", None).stream(images, "cells", config))
    there = list(ModelLoader(weights, "cuda", None, precision="fp32").stream(images, "cells", config))

    scores = ObjectScores()
    for one, other in zip(here, there, strict=True):
        assert one.error is None
        assert other.error is None
        scores.add(one.labels.astype("int32"), other.labels.astype("int32"))
    assert scores.as_dict()["ap75"] > 0.98
