import pytest
import torch

from brim.errors import ConfigError
from brim.segmentation.training.evaluation import WorstCrops
from brim.segmentation.training.objective import PixelCounts


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


def test_parts_of_images_give_the_score_of_the_whole():
    rng = torch.Generator().manual_seed(1)
    predicted, true = (torch.rand(3, 1, 8, 8, generator=rng) < 0.4 for _ in range(2))
    scores = PixelCounts(3, torch.device("cpu"))
    for half in (slice(0, 4), slice(4, 8)):
        scores.add(predicted[:, :, half], true[:, :, half], torch.arange(3))

    assert scores.result() == agreement(predicted, true)


def test_pixels_that_do_not_count_change_nothing():
    predicted, true = (
        mask("x.x"),
        mask("x.."),
    )
    scores = PixelCounts(1, torch.device("cpu"))
    scores.add(predicted, true, torch.tensor([0]), counted=mask("xx."))

    assert scores.result()["iou"] == 1.0


def test_no_images_are_refused():
    with pytest.raises(ConfigError, match="num_images=0"):
        PixelCounts(0, torch.device("cpu"))


def test_an_empty_crop_in_which_nothing_is_found_is_no_failure():
    worst, nothing = WorstCrops(["a.png"]), torch.zeros(1, 8, 8, dtype=torch.int32)
    worst.add([0], torch.zeros(1, 3, 8, 8, dtype=torch.uint8), nothing, nothing)

    assert worst.pictures("mask")[0]["caption"] == "a.png: IoU 1.00"
