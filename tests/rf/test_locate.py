"""Classical positions: exact without noise, as good as the bound with it, and honest about their errors."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from gaussian_rows import EXACT, PRODUCTION, gaussian_rows, padded, permuted
from scipy import stats

from brim.rf.config import preset
from brim.rf.features import F
from brim.rf.generation.drawn import draw_rows
from brim.rf.location.evaluate import coverage, mahalanobis
from brim.rf.location.model import Estimate
from brim.rf.location.solver import (
    SolverConfig,
    StrengthModel,
    _geman_mcclure,
    _huber,
    _time_loss,
    by_strength,
    calibrate,
    centroid,
    drop_one,
    geographic,
    invert,
    observe,
    residuals,
    solve,
    target,
)


@pytest.fixture(scope="module")
def noisy():
    return gaussian_rows(attempts=600)


@pytest.fixture(scope="module")
def seen(noisy):
    return observe(noisy, PRODUCTION, EXACT)


@pytest.fixture(scope="module")
def found(seen):
    return solve(seen)


def errors(rows, config=PRODUCTION, solver=None, method=solve):
    seen = observe(rows, config, EXACT)
    return (method(seen, solver).position - target(rows, seen.origin, config)).norm(dim=-1)


# Frame


def test_geographic_gives_back_the_place_a_target_came_from(noisy, seen):
    height = StrengthModel.of(PRODUCTION).tx_height_m
    place = geographic(target(noisy, seen.origin, PRODUCTION), seen.origin, height)

    assert place[:, :2] == pytest.approx(noisy["transmitter"][:, :2], abs=1e-7)
    assert place[:, 2] == pytest.approx(torch.full_like(place[:, 2], height), abs=1e-3)


def test_the_height_taken_for_granted_hardly_moves_the_position():
    rows = gaussian_rows(attempts=300, noisy=False)  # true heights are 0 to 600 m
    error = errors(rows)

    assert float(error.median()) < 5
    assert float((error / rows["crlb_m"]).quantile(0.99)) < 0.2


# Gauss-Newton


def test_positions_are_exact_without_noise():
    rows = gaussian_rows(attempts=200, noisy=False, level=True)
    error = errors(rows)

    assert float(error.quantile(0.99)) < 1.0  # float32 features: a few cm of arrival difference
    assert float(error.max()) < 0.02 * float(rows["crlb_m"].max())


@pytest.mark.parametrize("loss", ["free_space", "log_distance", "hata"])
def test_strength_alone_is_exact_without_noise(loss):
    config = replace(PRODUCTION, loss=loss, frequency_mhz=400.0, min_snr_db=-20.0, shadowing_db=1.0)
    rows = gaussian_rows(config, attempts=100, noisy=False, level=True)
    error = errors(rows, config, method=by_strength)

    assert float(error.quantile(0.9)) < 30  # float32 features: 1e-5 dB


def test_errors_reach_the_bound(noisy, found, seen):
    error = (found.position - target(noisy, seen.origin, PRODUCTION)).norm(dim=-1)

    assert float((error / noisy["crlb_m"]).square().mean().sqrt()) == pytest.approx(1, abs=0.1)


def test_covariance_holds_what_it_says(noisy, found, seen):
    true = target(noisy, seen.origin, PRODUCTION)

    assert float(mahalanobis(found.position, found.covariance, true).mean()) == pytest.approx(2, abs=0.3)
    estimate = Estimate.single(found.position, torch.linalg.cholesky(found.covariance), seen.origin)
    for level, share in coverage(estimate, true).items():
        assert share == pytest.approx(int(level) / 100, abs=0.04)


def test_more_starts_find_nothing_lower(seen, found):
    thorough = solve(seen, SolverConfig(grid=36, starts=10, steps=40))

    assert float((found.cost - thorough.cost).max()) < 0.01


def test_residuals_are_white(seen, found):
    time, strength, _ = residuals(seen, found)
    unknowns = 3 * len(found.cost)  # east, north, emission time
    total = time.square().sum() + strength.square().sum()
    count = seen.timed.sum() + seen.present.sum() - unknowns

    assert float(total / count) == pytest.approx(1, abs=0.05)
    assert not time[~seen.present].any()
    assert not strength[~seen.present].any()


# Sets


def test_order_of_receivers_does_not_matter(noisy, found):
    order = torch.randperm(noisy["present"].shape[1], generator=torch.Generator().manual_seed(1))
    other = solve(observe(permuted(noisy, order), PRODUCTION, EXACT))

    assert other.position == pytest.approx(found.position, abs=1e-2)


@pytest.mark.parametrize("fill", [1e4, math.nan])
def test_padding_does_not_matter(noisy, found, fill):
    other = solve(observe(padded(noisy, fill=fill), PRODUCTION, EXACT))

    assert other.position == pytest.approx(found.position, abs=1e-2)
    assert centroid(observe(padded(noisy, fill=fill), PRODUCTION, EXACT)).position.isfinite().all()


# Centroid and strength


def test_strength_alone_beats_the_centroid_and_arrivals_beat_both(noisy, seen, found):
    true = target(noisy, seen.origin, PRODUCTION)
    by = [(one.position - true).norm(dim=-1).median() for one in (found, by_strength(seen), centroid(seen))]

    assert by[0] < 0.1 * by[1]
    assert by[1] < by[2]


def test_arrivals_that_were_not_measured_do_not_count(noisy):
    rows = noisy | {"features": noisy["features"].clone()}
    rows["features"][:, :, F["arrival_difference_us"]] = 0
    rows["features"][:, :, F["arrival_sigma_us"]] = 1e6
    seen = observe(rows, PRODUCTION, EXACT)

    assert not seen.timed.any()
    assert solve(seen).position == pytest.approx(by_strength(seen).position, abs=1.0)


# Noise


def test_calibration_recovers_strength_and_timing_noise():
    config = replace(PRODUCTION, clock_sigma_s=1e-7)
    rows = gaussian_rows(config, attempts=800)
    rng = torch.Generator().manual_seed(4)
    features = rows["features"]
    features[..., F["snr_db"], 0] += -1.5 + 3.0 * torch.randn(features.shape[:2], generator=rng)
    other = torch.arange(features.shape[1]) != rows["reference"][:, None]
    features[..., F["arrival_difference_us"], 0] += 0.8 * torch.randn(features.shape[:2], generator=rng) * other

    noise = calibrate(rows, config)

    assert noise.strength_bias_db == pytest.approx(-1.5, abs=0.3)
    assert noise.strength_db == pytest.approx(3.0, abs=0.6)
    assert noise.timing_us == pytest.approx(0.75, abs=0.2)  # the reference has none: a little less on average


def test_invert_of_a_singular_matrix_is_finite():
    assert invert(torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])).isfinite().all()


def test_the_law_of_blocked_paths_halves_the_error():
    config = preset("city", seed=5)
    rows = draw_rows(config, np.arange(400))
    unaware = replace(config, blocked_share=0.0)
    medians = []
    for assumed in (config, unaware):
        seen = observe(rows, assumed, calibrate(rows, assumed))
        error = (solve(seen).position - target(rows, seen.origin, config)).norm(dim=-1)
        medians.append(float(error.median()))

    assert medians[0] < 0.65 * medians[1]
    assert medians[0] < 400


# The losses of residuals


LEFT = torch.tensor([-8.0, -3.001, -3.0, -2.999, -1.0, 0.0, 0.5, 2.999, 3.0, 3.001, 6.0], dtype=torch.float64)


def assert_is_loss(loss, expected):
    """The cost is the expected one, the second value its derivative."""
    left = LEFT.clone().requires_grad_()
    cost, pull, _ = loss(left)
    assert cost.detach().numpy() == pytest.approx(expected, abs=1e-9)
    (slope,) = torch.autograd.grad(cost.sum(), left)
    assert pull.detach() == pytest.approx(slope, abs=1e-6)


def test_hubers_loss_is_a_parabola_with_its_tangents():
    r = np.abs(LEFT.numpy())
    assert_is_loss(lambda left: _huber(left, 3.0), np.where(r <= 3, r**2 / 2, 4.5 + 3 * (r - 3)))


def test_geman_and_mcclures_loss_levels_off():
    r2 = LEFT.numpy() ** 2
    assert_is_loss(lambda left: _geman_mcclure(left, 3.0), 4.5 * r2 / (9 + r2))


def test_arrivals_of_blocked_links_are_normal_and_exponentially_late():
    """Against SciPy's density of the sum of a normal and an exponential number; later is negative here."""
    seen = observe(gaussian_rows(attempts=4), PRODUCTION, EXACT)
    seen = replace(seen, arrival_sigma_m=torch.full_like(seen.arrival_sigma_m, 200.0), blocked_share=0.3, blocked_m=500)
    seen = replace(seen, timed=torch.ones_like(seen.timed))
    shape = (len(LEFT), 1, seen.timed.shape[1])
    seen = replace(seen, timed=seen.timed[:1].expand(len(LEFT), -1), arrival_sigma_m=seen.arrival_sigma_m[:1])
    late = -LEFT.numpy()
    density = 0.7 * stats.norm.pdf(late) + 0.3 * stats.exponnorm.pdf(late, K=500 / 200)

    def loss(left):
        return (part[:, 0, 0] for part in _time_loss(seen, left[:, None, None].expand(shape), 3.0))

    assert_is_loss(loss, -np.log(density))


@pytest.mark.parametrize(("stations", "is_dropped"), [(4, False), (5, True)])
def test_an_arrival_is_dropped_only_where_the_others_can_tell_which(stations, is_dropped):
    """With four, every one of them could be the wrong one: without it the others fit exactly."""
    rows = gaussian_rows(attempts=60)
    whole = rows["present"].sum(-1) >= stations
    rows = {name: value[whole] for name, value in rows.items()}
    others = torch.arange(rows["present"].shape[1]) != rows["reference"][:, None]
    rank = torch.cumsum(rows["present"] & others, -1)
    rows["present"] = rows["present"] & (~others | (rank < stations))
    late = rows["present"] & others & (rank == 1)
    rows["features"][..., F["arrival_difference_us"], 0] += 60.0 * late
    seen = observe(rows, PRODUCTION, EXACT)
    whole, dropped = solve(seen), drop_one(seen)

    moved = (dropped.position - whole.position).norm(dim=-1)
    assert bool((moved > 100).double().mean() > 0.5) == is_dropped
    assert is_dropped or not moved.any()


def test_the_centroid_weighs_stations_by_their_power():
    rows = {name: value[:20] for name, value in gaussian_rows(attempts=40).items()}
    seen = observe(rows, PRODUCTION, EXACT)
    milliwatts = torch.where(seen.present, 10 ** (seen.strength_dbm / 10), 0.0)
    expected = (milliwatts[..., None] * seen.stations[..., :2]).sum(1) / milliwatts.sum(1, keepdim=True)

    assert centroid(seen).position == pytest.approx(expected, abs=1e-6)


def test_an_unknown_power_makes_no_difference():
    rows = gaussian_rows(attempts=30)
    louder = rows | {"features": rows["features"].clone()}
    louder["features"][..., F["snr_db"], 0] += 17.0
    one, other = (solve(observe(part, PRODUCTION, EXACT, power_known=False)) for part in (rows, louder))
    known = solve(observe(louder, PRODUCTION, EXACT))

    assert other.position == pytest.approx(one.position, abs=0.1)
    assert float((known.position - one.position).norm(dim=-1).median()) > 1
