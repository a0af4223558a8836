"""Scenes drawn by the batch: reproducible, and true to their labels."""

import cv2
import numpy as np
import pytest
import torch
from scipy.fft import dct

from brim.errors import ConfigError
from brim.segmentation.config import SampleConfig
from brim.segmentation.scenes.drawing import (
    QUANTITIES,
    DrawnScenes,
    _seed_word,
    blur_weights,
    cosine_matrix,
    draw,
    mix,
    take_quantities,
    unit,
)
from brim.segmentation.scenes.files import write_scenes
from brim.segmentation.scenes.kinds import KINDS, kinds_of


def scenes(
    *kinds: str, seed: int = 7, first: int = 0, count: int = 4, height: int = 96, width: int = 128
) -> DrawnScenes:
    return draw(kinds, seed, torch.arange(first, first + count, dtype=torch.int32), height, width)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_the_same_in_any_batch(kind):
    together, alone = scenes(kind), scenes(kind, first=2, count=1)
    assert together.images.shape == (4, 3, 96, 128)
    assert torch.equal(together.images[2:3], alone.images)
    assert torch.equal(together.labels[2:3], alone.labels)


def test_seeds_and_numbers_give_other_images():
    image = scenes("nuclei", count=1).images
    assert not torch.equal(image, scenes("nuclei", seed=8, count=1).images)
    assert not torch.equal(image, scenes("nuclei", first=1, count=1).images)


def test_every_kind_names_every_quantity():
    assert {kind: set(ranges) for kind, ranges in KINDS.items()} == {kind: set(QUANTITIES) for kind in KINDS}
    assert all(low <= high for ranges in KINDS.values() for low, high in ranges.values())


def test_nuclei_are_brighter_than_what_surrounds_them():
    drawn = scenes("nuclei", count=24)
    grey, inside = drawn.images.float().mean(1), drawn.labels > 0
    shown = inside.flatten(1).any(1)
    contrast = [
        float(image[mask].mean() - image[~mask].mean()) for image, mask in zip(grey[shown], inside[shown], strict=True)
    ]
    assert np.mean(np.array(contrast) > 0) > 0.95


def test_objects_are_labelled_up_to_their_edges_not_their_halos():
    index = torch.arange(60, dtype=torch.int32)
    quantities = take_quantities(("phase",), mix(mix(index) + _seed_word(7)))
    ratios = []
    for image, own in zip(draw(("phase",), 7, index, 160, 160).labels.numpy(), quantities, strict=True):
        diameter, spacing = (float(own[QUANTITIES.index(name)]) for name in ("diameter", "spacing"))
        cut = set(np.concatenate([image[[0, -1]].ravel(), image[:, [0, -1]].ravel()]).tolist())
        numbers, areas = np.unique(image, return_counts=True)
        whole = [area for number, area in zip(numbers.tolist(), areas, strict=True) if number not in cut | {0}]
        ratios += [2 * np.sqrt(area / np.pi) / diameter for area in whole if spacing > 1.6 and diameter < 30]
    assert len(ratios) > 50
    assert np.median(ratios) == pytest.approx(1, abs=0.1)  # with halos 1.3


def test_bacteria_are_rods_and_round_objects_are_round():
    def slimness(kind):
        labels = scenes(kind, count=12, height=160, width=160).labels.numpy()
        shapes = [(one == number).astype(np.uint8) for one in labels for number in np.unique(one)[1:]]
        sides = [cv2.minAreaRect(cv2.findNonZero(shape))[1] for shape in shapes if 30 < shape.sum() < 4000]
        return np.median([max(side) / min(side) for side in sides])

    assert slimness("bacteria") > 1.6
    assert slimness("round") < 1.25


def test_some_objects_touch():
    labels = scenes("nuclei", count=24).labels
    left, right = labels[:, :, :-1], labels[:, :, 1:]
    assert int(((left != right) & (left > 0) & (right > 0)).sum()) > 50


def test_files_hold_the_scenes_of_their_numbers_kinds_in_turn(tmp_path):
    config = SampleConfig(kind=("nuclei", "round"), images=3, size=64, seed=7)

    report = write_scenes(config, tmp_path / "out", torch.device("cpu"))

    objects = 0
    for number, kind in enumerate(("nuclei", "round", "nuclei")):
        drawn = scenes(kind, first=number, count=1, height=64, width=64)
        image, mask = (cv2.imread(str(tmp_path / "out" / folder / f"{kind}_{number:05d}.png"), cv2.IMREAD_UNCHANGED)
                       for folder in ("images", "masks"))  # fmt: skip
        assert np.array_equal(image[..., ::-1], drawn.images[0].permute(1, 2, 0))
        assert np.array_equal(np.unique(drawn.labels[0], return_inverse=True)[1].reshape(64, 64), mask)
        objects += int(mask.max())
    assert (report["images"], report["objects"], report["kinds"]) == (3, objects, ["nuclei", "round"])
    assert len(list((tmp_path / "out/masks").iterdir())) == 3
    with pytest.raises(ConfigError, match="is not empty"):
        write_scenes(config, tmp_path / "out", torch.device("cpu"))


def test_words_are_scrambled_as_published():
    """Wellons' lowbias32, and what is drawn from it, in whole numbers of Python."""
    words = [0, 1, 2**31, 2**32 - 1, *np.random.default_rng(0).integers(0, 2**32, 2000).tolist()]

    def lowbias32(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    mixed = mix(torch.from_numpy(np.array(words, np.uint32).view(np.int32)))

    assert mixed.numpy().view(np.uint32).tolist() == [lowbias32(word) for word in words]
    assert unit(mixed).tolist() == [(lowbias32(word) >> 8) / 2**24 for word in words]


@pytest.mark.parametrize("kind", ["nuclei", "tissue", "bacteria"])
def test_quantities_are_uniform_in_their_ranges_and_diameters_in_octaves(kind):
    keys = mix(torch.arange(8000, dtype=torch.int32))

    found = dict(zip(QUANTITIES, take_quantities((kind,), keys).double().T.numpy(), strict=True))

    for name, (low, high) in KINDS[kind].items():
        if name != "brightness":  # which is never near 0
            values = np.log(found[name]) if name == "diameter" else found[name]
            low, high = (np.log(low), np.log(high)) if name == "diameter" else (low, high)
            assert values.min() >= low - 1e-5 * abs(low)
            assert values.max() <= high + 1e-5 * abs(high)
            assert abs(values.mean() - (low + high) / 2) < 0.02 * (high - low) + 1e-7, name  # six deviations
    assert np.abs(found["brightness"]).min() >= 0.08 - 1e-6


def test_all_kinds_are_nuclei_six_times_as_often_as_another():
    every = kinds_of(("all",))

    assert {kind: every.count(kind) for kind in every} == {kind: 6 if kind == "nuclei" else 1 for kind in KINDS}


def test_the_lens_is_a_gaussian_and_the_compression_a_cosine_transform():
    quantities = torch.zeros(2, len(QUANTITIES))
    quantities[:, QUANTITIES.index("blur")] = torch.tensor([0.7, 2.0])
    taps = np.arange(-8, 9)
    for weights, sigma in zip(blur_weights(quantities).numpy(), (0.7, 2.0), strict=True):
        bell = np.exp(-(taps**2) / (2 * sigma**2))
        np.testing.assert_allclose(weights, bell / bell.sum(), atol=1e-6)
    np.testing.assert_allclose(cosine_matrix(torch.device("cpu")), dct(np.eye(8), axis=0, norm="ortho"), atol=1e-6)
