"""The network over receivers: a set, masked, in metres, and never worse than its solver before it has learned."""

import math

import pytest
import torch
from gaussian_rows import EXACT, PRODUCTION, gaussian_rows, padded, permuted, solver_estimate

from brim.errors import ConfigError
from brim.rf.features import F
from brim.rf.location.model import (
    Locator,
    LocatorConfig,
    gaussian_nll,
    prepare,
    principal_axes,
)
from brim.rf.location.run import check_features

SMALL = {"width": 32, "heads": 2, "layers": 2, "dropout": 0.0}


def prepared(rows):
    return rows | prepare(rows, PRODUCTION, EXACT)


@pytest.fixture(scope="module")
def rows():
    return gaussian_rows(attempts=96)


@pytest.fixture(scope="module")
def batch(rows):
    return prepared(rows)


def locator(batch, *, hybrid=True, awake=True, **changes):
    """An evaluating network; `awake` gives its last layer weights, as training would."""
    torch.manual_seed(5)
    model = Locator(LocatorConfig(hybrid=hybrid, **SMALL | changes)).eval()
    model.set_statistics(batch["features"], batch["present"])
    if awake:
        torch.nn.init.normal_(model.head.weight, std=0.05)
    return model


def same(one, other, abs_m=0.05):
    assert other.position_en.detach() == pytest.approx(one.position_en.detach(), abs=abs_m)
    assert other.root.detach() == pytest.approx(one.root.detach(), abs=abs_m, rel=1e-3)


# Sets


@pytest.mark.parametrize("hybrid", [True, False])
def test_order_of_receivers_does_not_matter(rows, batch, hybrid):
    model = locator(batch, hybrid=hybrid)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(2))

    same(model(batch), model(prepared(permuted(rows, order))), abs_m=0.2)


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("fill", [1e4, math.nan])
def test_padding_never_leaks(rows, batch, hybrid, fill):
    model = locator(batch, hybrid=hybrid)

    same(model(batch), model(prepared(padded(rows, fill=fill))), abs_m=0.2)


# Starting points


def test_untrained_hybrid_repeats_the_solver(batch):
    same(solver_estimate(batch), locator(batch, awake=False)(batch))


def test_axes_are_a_root_of_the_covariance():
    spread = torch.randn(50, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    covariance = spread @ spread.mT

    axes = principal_axes(covariance)

    assert axes @ axes.mT == pytest.approx(covariance, abs=1e-9)
    assert (axes[..., 0] * axes[..., 1]).sum(-1) == pytest.approx(torch.zeros(50), abs=1e-9)


# Likelihood and precision


def test_likelihood_is_the_multivariate_normals():
    rng = torch.Generator().manual_seed(6)
    root = torch.randn(20, 2, 2, generator=rng) * 300
    position, true = torch.randn(2, 20, 2, generator=rng) * 200
    normal = torch.distributions.MultivariateNormal(position.double(), (root @ root.mT).double())

    assert gaussian_nll(position, root, true) == pytest.approx(-normal.log_prob(true.double()), rel=1e-3)


def test_low_precision_moves_positions_less_than_a_metre(batch):
    model = locator(batch)
    with torch.no_grad():
        exact = model(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = model(batch)
    moved = (rough.position_en - exact.position_en).norm(dim=-1)
    sigma = exact.covariance.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()

    assert rough.position_en.dtype == rough.root.dtype == torch.float32
    assert float(moved.median()) < 1.0
    assert float((moved / sigma).max()) < 0.01


# Normalisation and configuration


def test_statistics_are_those_of_present_receivers_and_travel_with_the_weights(batch):
    model = locator(batch)
    fresh = Locator(model.config)
    fresh.load_state_dict(model.state_dict())
    snr = batch["features"][..., F["snr_db"], 0][batch["present"]]

    assert float(fresh.feature_mean[F["snr_db"] * 4]) == pytest.approx(float(snr.mean()), rel=1e-4)
    assert float(fresh.feature_std[F["snr_db"] * 4]) == pytest.approx(float(snr.std()), rel=1e-2)


def test_a_feature_that_is_not_known_counts_as_its_mean(batch):
    model = locator(batch)
    mean, unknown = batch["features"].clone(), batch["features"].clone()
    column = F["envelope_mean"]
    mean[:, :, column] = model.feature_mean[4 * column : 4 * column + 4]
    unknown[:, :, column] = math.nan

    same(model(batch | {"features": mean}), model(batch | {"features": unknown}))


def test_other_features_are_refused_by_name():
    names = LocatorConfig().features
    check_features(names, "data", ConfigError)

    with pytest.raises(ConfigError, match=r"data: .*loudness"):
        check_features([*names, "loudness"], "data", ConfigError)
    with pytest.raises(ConfigError, match="their order"):
        check_features(names[::-1], "data", ConfigError)


# Export
