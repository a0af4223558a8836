import cv2
import numpy as np

from brim.segmentation.scenes import make_cells, make_labels, write_cells


def test_an_image_depends_on_seed_and_index_alone():
    first, again = make_cells(3, 5, 96, 64), make_cells(3, 5, 96, 64)

    assert (first[0].shape, first[0].dtype, first[1].shape, first[1].dtype) == ((96, 64, 3), "uint8", (96, 64), "bool")
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    assert not np.array_equal(first[0], make_cells(3, 6, 96, 64)[0])
    assert not np.array_equal(first[0], make_cells(4, 5, 96, 64)[0])


def test_cells_are_numbered_and_one_piece_each():
    _, labels = make_labels(0, 1, 128, 128)
    numbers = range(1, labels.max() + 1)

    assert len(numbers) > 5
    assert np.array_equal(np.unique(labels), [0, *numbers])
    pieces = [cv2.connectedComponents((labels == number).astype(np.uint8))[0] - 1 for number in numbers]
    assert pieces == [1] * len(pieces)


def test_files_hold_what_was_made(tmp_path):
    write_cells(tmp_path / "images", tmp_path / "masks", 3, seed=2, height=48, width=64)

    image, labels = make_labels(2, 1, 48, 64)
    assert [file.name for file in sorted((tmp_path / "masks").iterdir())] == [f"cell_0000{n}.png" for n in range(3)]
    assert np.array_equal(cv2.imread(str(tmp_path / "images/cell_00001.png"))[:, :, ::-1], image)
    assert np.array_equal(cv2.imread(str(tmp_path / "masks/cell_00001.png"), cv2.IMREAD_UNCHANGED), labels)
