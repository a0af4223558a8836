import math

import numpy as np
import pytest
import torch

from brim.segmentation.objects.scores import ObjectScores
from brim.segmentation.training.evaluation import WorstCrops
from brim.segmentation.training.objective import PixelCounts, class_losses, instance_losses


def mask(*rows: str) -> torch.Tensor:
    return torch.tensor([[cell == "x" for cell in row] for row in rows])[None]


def agreement(predicted: torch.Tensor, true: torch.Tensor) -> dict[str, float]:
    scores = PixelCounts(len(true), true.device)
    scores.add(predicted, true, torch.arange(len(true)))
    return scores.result()


def test_scores_follow_their_formulas():
    found = agreement(mask("xx.", "..."), mask(".xx", "x.."))  # 1 in both, 2 predicted, 3 true

    assert found["dice"] == found["dice_per_image"] == pytest.approx(2 / 5)
    assert found["iou"] == found["iou_per_image"] == pytest.approx(1 / 4)


@pytest.mark.parametrize(("predicted", "true", "score"), [("..", "..", 1.0), ("x.", "..", 0.0), ("..", ".x", 0.0)])
def test_empty_masks_have_a_score(predicted, true, score):
    found = agreement(mask(predicted), mask(true))

    assert set(found.values()) == {score}


def test_pixels_weigh_alike_in_the_whole_and_images_in_the_mean():
    predicted, true = torch.zeros(2, 1, 4, 4, dtype=torch.bool), torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    predicted[0], true[0] = True, True  # 16 pixels right
    true[1, 0, 0, 0] = True  # 1 pixel missed

    found = agreement(predicted, true)

    assert found["iou"] == pytest.approx(16 / 17)
    assert found["iou_per_image"] == pytest.approx(0.5)


def test_pixels_that_do_not_count_change_nothing():
    predicted, true = (mask("x.x"), mask("x.."))
    scores = PixelCounts(1, torch.device("cpu"))
    scores.add(predicted, true, torch.tensor([0]), counted=mask("xx."))

    assert scores.result()["iou"] == 1.0


def test_an_empty_crop_in_which_nothing_is_found_is_no_failure():
    worst, nothing = WorstCrops(["a.png"]), torch.zeros(1, 8, 8, dtype=torch.int32)
    worst.add([0], torch.zeros(1, 3, 8, 8, dtype=torch.uint8), nothing, nothing)

    assert worst.pictures("mask")[0]["caption"] == "a.png: IoU 1.00"


def test_the_crops_that_score_worst_are_kept_worst_first():
    true, predicted = torch.zeros(4, 8, 8, dtype=torch.int32), torch.zeros(4, 8, 8, dtype=torch.int32)
    true[:, :4, :4] = predicted[0, :4, :4] = predicted[2, :4, :3] = 1
    predicted[3, 7, 7] = 1
    worst = WorstCrops(None, most=3)

    worst.add(range(4), torch.zeros(4, 3, 8, 8, dtype=torch.uint8), true, predicted)

    assert [(crop.source, crop.score) for crop in worst.crops] == [(1, 0), (3, 0), (2, 1)]
    assert worst.pictures("mask")[2]["caption"] == "scene 2: IoU 0.75"


def test_scores_of_objects_counted_by_hand():
    """IoU 0.78, IoU 0.62, one object missed, one made up; then an image with three found for two."""
    true, predicted = (np.zeros((40, 40), int) for _ in range(2))
    true[:10, :10], true[:10, 20:30], true[20:30, :10] = 1, 2, 3
    predicted.flat[[40 * row + column for row in range(10) for column in range(10)][:78]] = 7
    predicted.flat[[40 * row + 20 + column for row in range(10) for column in range(10)][:62]] = 8
    predicted[20:30, 20:30] = 9
    scores = ObjectScores()

    scores.add(true, predicted)

    found = scores.as_dict()
    assert found["ap50"] == pytest.approx(2 / (3 + 3 - 2))
    assert found["ap75"] == pytest.approx(1 / (3 + 3 - 1))
    assert found["ap50_90"] == pytest.approx((3 * 2 / 4 + 3 * 1 / 5 + 3 * 0) / 9)
    assert found["f1"] == pytest.approx(2 * 2 / 6)
    assert found["pq"] == pytest.approx(2 * (0.78 + 0.62) / 6)
    assert (found["true"], found["predicted"], found["merges"], found["splits"]) == (3, 3, 0, 0)
    scores.add(np.array([[1, 0, 2, 0, 0, 0]]), np.array([[0, 1, 0, 2, 0, 3]]))
    assert scores.as_dict()["count_error"] == pytest.approx((0 + 1 / 2) / 2)
    assert scores.as_dict()["ap50"] == pytest.approx(2 / (5 + 6 - 2))


def test_the_loss_of_classes_is_a_mean_over_the_pixels_whose_class_is_known():
    logits = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.0, 1.0, -0.5, 1.0]]).view(1, 2, 2, 2)
    kinds = torch.tensor([[0, 1], [2, 0]])[None]

    found = class_losses(torch.cat([logits, logits]), torch.cat([kinds, 0 * kinds]))

    second, third = math.log(1 + math.exp(1 + 2)), math.log(1 + math.exp(0.5 + 0.5))
    assert found.tolist() == pytest.approx([(second + third) / 2, 0])


def test_the_error_of_the_height_counts_three_times():
    maps = torch.stack([torch.full((8, 8), -40.0), torch.zeros(8, 8)])[None]  # no foreground; height 0.5 for 0

    found = instance_losses(maps, torch.zeros(1, 8, 8, dtype=torch.int32), 1)

    assert found.tolist() == pytest.approx([3 * (0.5 - 0.1 / 2)], abs=1e-6)
