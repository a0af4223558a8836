"""Bulk prediction by workers that die as chance has it: what the head decides, without a cluster."""

from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import cv2
import pytest
import torch
from inline_pool import InlinePool

from brim.cluster import predict as module
from brim.cluster.predict import BulkAssignment, check_nodes, predict_many
from brim.cluster.ray_connect import Node, RayCluster
from brim.errors import ClusterError
from brim.segmentation.config import FilesConfig
from brim.segmentation.networks import create_model, save_weights
from brim.segmentation.prediction import ModelLoader, Recipe, predict_files
from brim.segmentation.scenes import make_cells

torch.set_num_threads(1)
NUM, BROKEN = 8, 3
FILES = FilesConfig(model="unet_tiny", strict=True, batch_size=2, tile=64)
NODE = Node(id="n", host="small", cpus=1, gpus=0, free_bytes=2**33, versions={})


def save(seed, file):
    torch.manual_seed(seed)
    save_weights(create_model("unet_tiny"), file, {})
    return file


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Images, one of them cut off, weights, and what one process makes of them."""
    path = tmp_path_factory.mktemp("bulk")
    (path / "images").mkdir()
    for index in range(NUM):
        cv2.imwrite(str(path / f"images/{index}.png"), make_cells(5, index, 64, 64)[0])
    broken = path / f"images/{BROKEN}.png"
    broken.write_bytes(broken.read_bytes()[:300])
    loader = ModelLoader({"unet_tiny": save(3, path / "weights.safetensors")}, "cpu", None, tile=64)
    predict_files([path / "images"], loader, path / "out", FILES)
    return path


@pytest.fixture
def predict(one, monkeypatch):
    """Predict on the workers of a pool that is given."""

    def run(pool, out, *, images=one / "images", weights=one / "weights.safetensors", files=FILES, **options):
        @contextmanager
        def connect(address):
            yield RayCluster(address=address, nodes=(NODE,))

        monkeypatch.setattr(module, "connect", connect)
        monkeypatch.setattr(module, "RayPool", lambda cluster, use_gpus: pool)
        return predict_many([images], out, Recipe(files=files, device="cpu"), weights, "auto", **options)

    return run


def results(out):
    return {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}


@pytest.mark.parametrize("seed", range(3))
def test_every_image_is_predicted_once_whatever_order_and_deaths_there_are(one, predict, tmp_path, seed):
    told = []
    pool = InlinePool(1 + seed, seed=seed, losses=0.15 * seed)

    found = predict(pool, tmp_path, progress=told.append)

    assert results(tmp_path) == results(one / "out")
    broken = str(one / f"images/{BROKEN}.png")
    assert (found.written, found.kept, list(found.failures), found.stopped) == (NUM - 1, 0, [broken], False)
    assert (found.report.images, found.report.failed) == (NUM, 1)
    assert [now.done for now in told] == sorted(now.done for now in told)
    assert (told[-1].done, told[-1].failed, told[-1].total) == (NUM, 1, NUM)
    assert found.report.stages["workers"] == 1 + seed


def test_only_what_is_gone_or_changed_is_made_again(one, predict, tmp_path):
    images, out = tmp_path / "images", tmp_path / "out"
    images.mkdir()
    for index in range(4):
        (images / f"{index}.png").write_bytes((one / f"images/{(index + 4)}.png").read_bytes())

    def again(**options):
        found = predict(InlinePool(2), out, images=images, **options)
        return found.written, found.kept

    assert again() == (4, 0)
    whole = results(out)
    (out / "1.geojson").unlink()
    (images / "2.png").write_bytes((one / "images/1.png").read_bytes())
    assert again() == (2, 2)
    assert results(out) == {**whole, "2.geojson": results(one / "out")["1.geojson"]}
    assert again() == (0, 4)
    assert again(files=replace(FILES, batch_size=1)) == (0, 4)
    other = save(4, tmp_path / "other.safetensors")
    assert again(weights=other) == (4, 0)
    assert again(weights=other, files=replace(FILES, threshold=0.4)) == (4, 0)


class Poisoned(InlinePool):
    """Workers die over one image; how often they did."""

    def __init__(self, num, name):
        super().__init__(num)
        self.name, self.deaths = name, 0

    def step(self, worker):
        images, _ = self.alive[worker][0][1]
        self.losses = float(any(image.name.endswith(self.name) for image in images))
        self.deaths += bool(self.losses)
        super().step(worker)


@pytest.mark.parametrize("num", [1, 2])
def test_an_image_that_ends_every_worker_is_given_up_alone(one, predict, tmp_path, num):
    pool = Poisoned(num, "1.png")

    found = predict(pool, tmp_path)

    poison = str(one / "images/1.png")
    assert found.failures[poison].startswith(f"{poison}: 2 workers died over it alone")
    assert results(tmp_path) == {name: data for name, data in results(one / "out").items() if name != "1.geojson"}
    assert pool.deaths == 4  # twice with what else the worker had, then twice alone


def test_an_image_under_suspicion_is_given_to_an_idle_worker_and_nothing_beside_it():
    plain, suspect = (lambda: module._Parcel([])), (lambda: module._Parcel([], alone=True))
    run, given, waiting = object.__new__(module._Run), [], [suspect(), plain(), plain()]
    run._records, run._left = None, deque(waiting)
    run._workers = {0: ("cpu", {1: plain()}), 1: ("cpu", {}), 2: ("cpu", {2: suspect()})}
    pool = SimpleNamespace(submit=lambda worker, task: given.append(worker) or 9)

    run._feed(pool)

    assert given == [1]
    assert run._workers[1][1] == {9: waiting[0]}
    assert list(run._left) == waiting[1:]


def test_without_workers_it_ends_with_the_reason_and_says_how_to_go_on(predict, tmp_path):
    pool = InlinePool(2, losses=0.5, seed=1, replaces=False)

    with pytest.raises(ClusterError, match=r"the cluster lost the work: worker w. died.*run the same again"):
        predict(pool, tmp_path)

    kept = len(results(tmp_path))
    assert predict(InlinePool(2), tmp_path).kept == kept


def test_a_stop_is_heard_and_leaves_no_report(predict, tmp_path):
    found = predict(InlinePool(1), tmp_path, stop=lambda: any(tmp_path.glob("*.geojson")))

    assert (found.stopped, found.report) == (True, None)
    assert 0 < len(results(tmp_path)) == found.written < NUM - 1


def test_one_file_of_all_images_is_put_together_in_their_order(one, predict, tmp_path):
    files = replace(FILES, format="coco")
    loader = ModelLoader({"unet_tiny": one / "weights.safetensors"}, "cpu", None, tile=64)
    predict_files([one / "images"], loader, tmp_path / "one", files)

    predict(InlinePool(3, losses=0.2, seed=2), tmp_path / "many", files=files)

    assert (tmp_path / "many/annotations.json").read_bytes() == (tmp_path / "one/annotations.json").read_bytes()


# What is refused


def test_a_worker_that_sees_other_files_under_the_same_paths_is_refused(one):
    file = one / "images/0.png"

    for seen in ({str(file): file.stat().st_size + 1}, {str(file.with_name("none.png")): 5}):
        assignment = BulkAssignment(recipe=Recipe(files=FILES), weights=b"", sizes=None, place=None, seen=seen)
        with pytest.raises(ClusterError, match=r"does not see .*\.png"), assignment.open("cpu", 1):
            pass


def test_a_node_without_memory_is_refused_by_name():
    check_nodes([NODE])
    small = Node(id="n", host="small", cpus=1, gpus=0, free_bytes=2**30 - 1, versions={})
    with pytest.raises(ClusterError, match=r"node small has .* of memory free, bulk prediction needs 1"):
        check_nodes([NODE, small])
