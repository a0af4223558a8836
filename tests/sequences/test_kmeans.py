import pytest
import torch
from torch import Tensor

from brim.engine.device import stream
from brim.sequences.evaluation.scores import cluster_scores
from brim.sequences.training import kmeans as module
from brim.sequences.training.kmeans import kmeans

CPU = torch.device("cpu")


def blobs(clusters: int = 5, each: int = 60, dim: int = 8, apart: float = 12.0) -> tuple[Tensor, Tensor]:
    torch.set_num_threads(1)
    rng = stream(5, "blobs", device=CPU)
    centres = apart * torch.randn(clusters, dim, generator=rng)
    truth = torch.arange(clusters).repeat(each)
    return centres[truth] + torch.randn(len(truth), dim, generator=rng), truth


def test_it_finds_clusters_that_are_there():
    points, truth = blobs()

    found = kmeans(points, 5)

    assert cluster_scores(found.labels, truth)["ari"] == 1.0
    means = torch.stack([points[found.labels == label].mean(0) for label in range(5)])
    assert torch.allclose(found.centres, means, atol=1e-4)
    assert found.inertia == pytest.approx(float((points - means[found.labels]).square().sum()), rel=1e-4)


def test_each_start_is_drawn_by_its_squared_distance_to_the_nearest_before():
    x = torch.tensor([[0.0], [1.0], [3.0]])

    starts = module._start_centres(x, 3, 6000, 0)[..., 0]

    assert starts.sort(1).values.unique(dim=0).tolist() == [[0, 1, 3]]  # never one twice
    second = starts[starts[:, 0] == 0][:, 1]
    assert len(second) == pytest.approx(2000, abs=150)  # standard deviation 37
    assert float((second == 3).float().mean()) == pytest.approx(9 / 10, abs=0.03)  # 0.007
    assert float((starts[starts[:, 0] == 1][:, 1] == 3).float().mean()) == pytest.approx(4 / 5, abs=0.04)


def test_chunks_do_not_matter(monkeypatch):
    points, _ = blobs(3, 50, 4)
    whole = kmeans(points, 3)

    monkeypatch.setitem(module._CHUNK_NUMBERS, "cpu", 200)
    parts = kmeans(points, 3)

    assert torch.equal(whole.labels, parts.labels)
    assert parts.inertia == pytest.approx(whole.inertia, rel=1e-5)


def test_points_far_from_the_origin_are_told_apart():
    points, truth = blobs(apart=6.0)

    found = kmeans((points + 20_000).float(), 5)

    assert cluster_scores(found.labels, truth)["ari"] > 0.99


def test_a_cluster_that_lost_its_points_begins_anew_at_the_farthest():
    x = torch.tensor([[0.0], [1.0], [10.0]])
    centres = torch.tensor([[[0.5], [100.0], [200.0]]])  # the second and third get nothing

    moved = module._means(x, module._nearest(x, centres))

    assert moved[0].flatten().tolist() == pytest.approx([11 / 3, 10.0, 0.0])


@pytest.mark.parametrize("clusters", [1, 2, 7])
def test_copies_of_few_points_are_no_trouble(clusters):
    points = torch.tensor([[0.0, 1.0], [4.0, 4.0]]).repeat(5, 1)[:7]

    found = kmeans(points, clusters)

    assert torch.isfinite(found.centres).all()
    assert found.inertia == pytest.approx(
        0.0 if clusters > 1 else float(points.var(0, correction=0).sum() * 7), abs=1e-4
    )


def test_the_best_of_several_starts_is_kept_and_starts_depend_on_the_seed():
    points, _ = blobs(clusters=12, each=10, dim=2, apart=3.0)

    single = [kmeans(points, 12, restarts=1, seed=seed).inertia for seed in range(8)]

    assert len(set(single)) > 4
    assert kmeans(points, 12, restarts=40).inertia < 1.001 * min(single)
