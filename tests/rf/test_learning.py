"""Samples without IQ, posteriors that are mixtures, baselines, and training on samples made in memory."""

import json
import math

import numpy as np
import pytest
import torch
from gaussian_rows import EXACT, PRODUCTION, gaussian_rows, permuted, solver_estimate

from brim.cli import main
from brim.rf.config import GenerateConfig, LocatorTraining, preset
from brim.rf.features import F
from brim.rf.generation.drawn import DRAWN, draw_accepted, draw_rows
from brim.rf.generation.stages import generate_batch
from brim.rf.location import Streamed, evaluate_run, load_run, split, train
from brim.rf.location.evaluate import baselines, coverage, draw_positions, fitted_stretch, geojson, levels_of
from brim.rf.location.fingerprints import Fingerprints
from brim.rf.location.model import Estimate, Locator, LocatorConfig, mixture_nll, prepare, turned
from brim.rf.location.solver import observe, target
from brim.rf.location.training import _Bar, _Watch
from brim.rf.physics.geometry import to_local

QUICK = {"epochs": 2, "width": 16, "layers": 1}


def mixture(weights=(0.7, 0.3), apart=5_000.0, num=1):
    """Two round Gaussians of 100 and 300 m."""
    means = torch.tensor([[0.0, 0.0], [apart, 0.0]]).expand(num, 2, 2)
    roots = (torch.tensor([100.0, 300.0])[:, None, None] * torch.eye(2)).expand(num, 2, 2, 2)
    origin = torch.tensor([[45.0, 8.0, 200.0]], dtype=torch.float64).expand(num, 3)
    return Estimate.mixed(torch.tensor(weights).log().expand(num, 2), means, roots, origin)


# Samples without IQ


@pytest.mark.parametrize("clip_db", [0.0, 40.0])
def test_samples_without_iq_are_those_with_it(clip_db):
    config = preset("city", seed=4, duration_s=0.2, adc_clip_db=clip_db, clock_sigma_s=2e-5)
    real = generate_batch(config, range(12), "cpu")
    drawn = draw_rows(config, real["index"].numpy())
    here = real["present"]

    assert torch.equal(drawn["present"], here)
    for name, least in {"rssi_dbm": 0.3, "snr_db": 0.8}.items():
        off = (drawn["features"] - real["features"])[..., F[name], 0][here]
        assert float(off.abs().median()) < least
    sure = here & (real["features"][..., F["snr_db"], 0] > 20) & (drawn["reference"] == real["reference"])[:, None]
    off = (drawn["features"] - real["features"])[..., F["arrival_difference_us"], 0][sure]
    assert float(off.abs().median()) < 0.7  # of arrivals that are tens of µs apart
    stated = [rows["features"][..., F["arrival_sigma_us"], 0][sure].median() for rows in (drawn, real)]
    assert 0.4 < float(stated[0] / stated[1]) < 1.5


# Mixtures


def test_the_likelihood_of_a_mixture_is_torchs():
    found, true = mixture(num=3), torch.tensor([[50.0, -80.0], [4_800.0, 300.0], [2_500.0, 0.0]])
    parts = torch.distributions.MultivariateNormal(found.means, found.roots @ found.roots.mT)
    whole = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(found.weights), parts)

    assert mixture_nll(found, true) == pytest.approx(-whole.log_prob(true), rel=1e-4)


def test_regions_of_a_mixture_hold_what_they_say():
    found = mixture(num=2_000)
    true = draw_positions(found, 1, number=7)[:, 0]

    for name, share in coverage(found, true).items():
        assert share == pytest.approx(int(name) / 100, abs=0.025)
    assert float(levels_of(mixture(), torch.tensor([[2_500.0, 0.0]]))) > 0.99


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.7])
def test_regions_too_narrow_or_wide_are_stretched_to_hold_what_they_say(factor):
    found = mixture(num=1_500)
    true = draw_positions(found, 1, number=7)[:, 0]
    said = found._replace(roots=found.roots * factor)

    assert fitted_stretch(said, true) == pytest.approx(1 / factor, rel=0.06)


def test_a_region_may_have_two_parts_and_its_area_is_that_of_both():
    features = geojson(mixture())["features"]
    kinds = {one["properties"].get("probability"): one["geometry"]["type"] for one in features}
    area = features[0]["properties"]["region_km2"]

    assert kinds == {None: "Point", 0.5: "Polygon", 0.9: "MultiPolygon", 0.95: "MultiPolygon"}
    # 50 %: of the first alone, a disc that holds 5/7 of it
    assert area["50"] == pytest.approx(math.pi * 0.1**2 * -2 * math.log(2 / 7), rel=0.1)
    assert area["95"] > area["90"] > area["50"]
    modes = features[0]["properties"]["modes"]
    assert [mode["weight"] for mode in modes] == pytest.approx(mixture().weights[0].tolist(), abs=0.03)


def test_the_position_is_where_the_expected_error_is_least():
    found = mixture()
    draws = draw_positions(found, 4_000)[0]

    def error(east):
        return float((draws - torch.tensor([east, 0.0])).norm(dim=-1).mean())

    assert error(float(found.position_en[0, 0])) < 1.01 * min(map(error, range(-500, 5_500, 50)))
    assert float(found.position_en[0, 1]) == pytest.approx(0, abs=1e-3)


def test_the_covariance_of_a_mixture_is_that_of_its_draws_about_the_position():
    found = mixture()._replace(roots=mixture().roots @ torch.tensor([[1.0, 0.0], [0.5, 2.0]]))
    found = Estimate.mixed(found.weights.log(), found.means, found.roots, found.origin)
    off = (draw_positions(found, 200_000)[0] - found.position_en).double()
    expected = off.mT @ off / len(off)

    assert found.covariance[0] == pytest.approx(expected, rel=0.02, abs=0.01 * float(expected.max()))
    assert (found.root @ found.root.mT)[0] == pytest.approx(found.covariance[0], rel=1e-4)


def test_a_widened_answer_has_all_variances_times_the_factor():
    found, true = mixture(), torch.tensor([[50.0, -80.0]])
    wide = found.widened(4.0)
    moved = found.position_en + 2 * (true - found.position_en)

    assert wide.covariance == pytest.approx(4 * found.covariance, rel=1e-4)
    assert wide.root == pytest.approx(2 * found.root, rel=1e-4)
    assert mixture_nll(wide, moved) == pytest.approx(mixture_nll(found, true) + math.log(4), rel=1e-4)


# The network


@pytest.mark.parametrize("stations", [0, 7])
@pytest.mark.parametrize("hybrid", [True, False])
def test_order_of_receivers_does_not_matter_to_a_mixture(hybrid, stations):
    config = preset("amateur", seed=3)
    rows = draw_rows(config, np.arange(30))
    order = torch.randperm(7, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(5)
    model = Locator(LocatorConfig(hybrid=hybrid, components=6, stations=stations, width=16, features=DRAWN)).eval()
    model.set_statistics(rows["features"], rows["present"])
    torch.nn.init.normal_(model.head.weight, std=0.1)
    with torch.no_grad():
        one, other = (model(part | prepare(part, config)) for part in (rows, permuted(rows, order)))

    sigma = one.covariance.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
    assert float(((one.position_en - other.position_en).norm(dim=-1) / sigma).max()) < 0.01


def test_turning_samples_keeps_what_the_solver_says_of_the_truth():
    rows = gaussian_rows(attempts=60)
    batch = prepare(rows, PRODUCTION, EXACT) | {"features": rows["features"], "present": rows["present"]}
    other = turned(batch, torch.Generator().manual_seed(3))

    assert not torch.equal(other["stations"], batch["stations"])
    before, after = (mixture_nll(solver_estimate(part), part["target"]) for part in (batch, other))
    assert after == pytest.approx(before, rel=1e-3, abs=1e-2)
    far = (other["stations"] - other["target"][:, None]).norm(dim=-1)
    assert far == pytest.approx((batch["stations"] - batch["target"][:, None]).norm(dim=-1), rel=1e-4)


# Baselines


def test_a_wrong_arrival_is_dropped_and_hardly_pulls_redescending_losses():
    rows = gaussian_rows(attempts=40)
    true = target(rows, observe(rows, PRODUCTION, EXACT).origin, PRODUCTION)
    other = (rows["reference"] + 1) % 5
    rows["features"][torch.arange(len(true)), other, F["arrival_difference_us"], :] += 30.0
    found = baselines(rows, PRODUCTION, EXACT)
    median = {name: float((one.position_en - true).norm(dim=-1).median()) for name, one in found.items()}

    assert median["drop_one"] < 0.8 * median["arrival_strength"]
    assert median["geman_mcclure"] < 0.9 * median["arrival_strength"]


def test_the_posterior_on_a_grid_covers_what_it_says():
    rows = gaussian_rows(attempts=120)
    found = baselines(rows, PRODUCTION, EXACT)["grid"]
    shares = coverage(found, target(rows, found.origin, PRODUCTION).float())

    assert shares["50"] == pytest.approx(0.5, abs=0.1)
    assert shares["90"] == pytest.approx(0.9, abs=0.06)


def test_fingerprints_know_a_valley_better_than_any_law_of_distance():
    config = preset("valley", seed=1)
    known = Fingerprints.of(draw_accepted(config, 3_000), config, power_known=True)
    rows = draw_accepted(preset("valley", seed=2), 100)
    found = baselines(rows, config, power_known=True, fingerprints=known)
    true = target(rows, found["strength"].origin, config)
    median = {name: float((one.position_en - true).norm(dim=-1).median()) for name, one in found.items()}

    assert median["fingerprint"] < 0.75 * median["strength"]


def test_a_fingerprint_is_the_mean_of_those_alike_with_their_spread():
    config = preset("valley", seed=1)
    rows = draw_accepted(config, 400)
    known = Fingerprints.of(rows, config, power_known=True)
    origin = torch.tensor([[45.0, 8.0, 300.0]], dtype=torch.float64)
    found = known.locate({name: value[:1] for name, value in rows.items()}, origin)
    strength = known.strength_db
    weight = torch.exp(-0.5 * ((strength - strength[:1]) ** 2).mean(-1) / known.width_db**2).double()
    weight = weight / weight.sum()
    flat = to_local(known.place, origin)[:, :2]
    mean = (weight[:, None] * flat).sum(0)
    spread = torch.cov(flat.T, aweights=weight, correction=0) + 100.0**2 * torch.eye(2)

    assert found.position_en[0] == pytest.approx(mean, abs=1)
    assert found.covariance[0] == pytest.approx(spread, rel=1e-3)
    clear = (rows["features"][..., F["snr_db"], 0] > config.min_snr_db).all(-1)  # others stay at their threshold
    everywhere = {name: value[clear] for name, value in rows.items()}
    louder = everywhere | {"features": everywhere["features"].clone()}
    louder["features"][..., F["snr_db"], 0] += 7.0
    relative = Fingerprints.of(rows, config, power_known=False)
    one, other, absolute = (
        prints.locate(part, origin).position_en
        for prints, part in ((relative, everywhere), (relative, louder), (known, louder))
    )
    assert len(one) > 3
    assert other == pytest.approx(one, abs=1)
    assert float((absolute - one).norm(dim=-1).median()) > 100


# Training


def test_a_stream_trains_a_run_that_is_evaluated_like_any_other(tmp_path):
    config = GenerateConfig(duration_s=0.2, tx_power_dbm=45.0, shadowing_distance_m=500.0)
    made = Streamed(generation=config, samples=300, drawn=True)
    report = train([], tmp_path / "run", LocatorTraining(**QUICK), stream=made, device="cpu")
    loaded = load_run(tmp_path / "run")
    history = [json.loads(line) for line in (tmp_path / "run" / "train" / "metrics.jsonl").read_text().splitlines()]

    assert report.epochs == 2
    assert loaded.module.config.features == DRAWN
    assert loaded.module.config.stations == 7
    assert any("val_share_of_best_baseline" in line for line in history)
    places = loaded.fingerprints().place[:, :2]
    held_out = made.rows(torch.device("cpu"))["transmitter"][split(300, LocatorTraining(**QUICK))[1], :2]
    assert len(places) == 270
    assert float(torch.cdist(held_out, places.double()).min()) > 1e-9  # none was looked at


def test_without_a_common_clock_no_arrival_is_read(tmp_path):
    config = GenerateConfig(duration_s=0.2, tx_power_dbm=45.0, clock="none")
    made = Streamed(generation=config, samples=40, drawn=True)
    train([], tmp_path / "run", LocatorTraining(**QUICK | {"epochs": 1}), stream=made, device="cpu")

    assert load_run(tmp_path / "run").module.config.features == ("rssi_dbm", "snr_db", "noise_floor_dbm")


def test_a_stream_of_records_has_every_feature(tmp_path):
    config = GenerateConfig(duration_s=0.2, tx_power_dbm=45.0)
    made = Streamed(generation=config, samples=8)
    rows = made.rows(torch.device("cpu"))

    assert len(made.features) == len(F)
    assert torch.equal(rows["index"], draw_accepted(config, 8)["index"])


def test_training_ends_where_there_is_nothing_to_learn(caplog):
    caplog.set_level("INFO", "brim")
    watch = _Watch(_Bar("mixture", 300.0, 500), LocatorTraining(epochs=30))
    scores = [watch.scored({"val_loss": 14.0, "val_median_error_m": 301.0}) for _ in range(8)]

    assert scores[0]["val_share_of_best_baseline"] == pytest.approx(1.003, abs=1e-3)
    assert watch.hopeless
    assert "nothing to learn here: no better than the solver with the law of blocked paths (300 m)" in caplog.text
    better = _Watch(_Bar("mixture", 300.0, 500), LocatorTraining(epochs=30))
    for _ in range(8):
        better.scored({"val_loss": 14.0, "val_median_error_m": 200.0})
    assert not better.hopeless


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give datasets to train on, or --stream"),
        (["--stream", "citty"], "citty is neither a preset nor a .toml file; did you mean city"),
        (["data", "--feature-level"], "--feature-level is for --stream"),
    ],
)
def test_contradicting_words_are_refused_before_anything_is_written(words, said, tmp_path, capfd):
    out = tmp_path / "run"

    assert main(["rf", "train", *words, "--out", str(out)]) == 2
    assert said in capfd.readouterr().err.replace("\n", " ")
    assert not out.exists()


def test_an_environment_of_another_seed_is_said(tmp_path, caplog):
    config = GenerateConfig(duration_s=0.2, tx_power_dbm=45.0, shadowing_distance_m=500.0)
    made = Streamed(generation=config, samples=60, drawn=True)
    train([], tmp_path / "run", LocatorTraining(**QUICK | {"epochs": 1}), stream=made, device="cpu")
    from small_dataset import write_dataset

    write_dataset(tmp_path / "data", GenerateConfig(**config.as_dict() | {"seed": 2, "stations": config.stations}))
    found = evaluate_run(tmp_path / "run", tmp_path / "data", device="cpu")

    assert found.metrics["differences"]["environment_seed"] == {"data": 2, "run": 0}
    assert found.metrics["best_baseline"] in found.metrics["baselines"]
