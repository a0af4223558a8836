"""Forms made from what the API says of a kind, what they send, and what pages say of jobs and tuning."""

import pytest

pytest.importorskip("nicegui")

from brim.jobs.kinds import KINDS, config_schema, read_body
from brim.segmentation.config import NETWORKS
from brim.service.dashboard import words
from brim.service.dashboard.form_fields import FormField, field_of, make_config, read_fields
from brim.service.dashboard.job import job_body
from brim.service.dashboard.receivers import read_receivers
from brim.service.dashboard.tuning import options_of, per_batch


def fields(kind: str) -> list[FormField]:
    return read_fields(kind, config_schema(kind))


def filled(kind: str, **values: object) -> dict:
    known = fields(kind)
    named = {field.path for field in known}
    given = {name.replace("__", "."): value for name, value in values.items()}
    assert given.keys() <= named
    return make_config(known, {field.path: given.get(field.path, field.start) for field in known})


# Receivers


def test_receivers_are_read_from_csv_and_what_is_wrong_is_named():
    assert read_receivers("\ufeffname, lat, lon, alt\nA, 45, 7.5, 100\n") == [
        {"name": "A", "lat": 45.0, "lon": 7.5, "alt": 100.0}
    ]
    for text, reason in {"": "header", "name,lat\nA,1\n": "header", "name,lat,lon,alt\nA,x,7,1\n": "line 2"}.items():
        with pytest.raises(ValueError, match=reason):
            read_receivers(text)


# Fields


def test_every_kind_has_a_field_for_everything_in_its_config_and_every_network_a_sentence():
    assert [name for name in NETWORKS if not words.network(name)] == []
    for kind in KINDS:
        tops = {field.path.partition(".")[0] for field in fields(kind)}
        properties = config_schema(kind)["properties"]
        assert tops == {name for name, part in properties.items() if part.get("type") != "null"} - {"preset"}


# What is sent


def test_what_is_left_as_it_was_is_not_sent():
    assert filled("rf.generate") == {"num_samples": 1000}
    assert filled("rf.generate", num_samples="8", tx_power_dbm="40", waveform="nbfm") == {"num_samples": 8}


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("9223372036854775807", 9223372036854775807),  # as a float it would be another
        ("1e3", 1000),
        ("1.5", 1.5),
        ("nan", "nan"),
        ("many", "many"),
        (" 7 ", 7),
    ],
)
def test_a_number_stays_a_number_and_what_is_none_goes_to_the_api_as_it_is(text, sent):
    assert filled("rf.generate", seed=text)["seed"] == sent


def test_nested_fields_are_sent_within_their_part_and_a_part_may_be_switched_off():
    assert filled("segment.train", augmentation__noise="0.1")["augmentation"] == {"noise": 0.1}
    assert filled("sequence.train", augmentation=False, augmentation__noise="0.3")["augmentation"] is None
    assert "augmentation" not in filled("sequence.train")


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_resolved_config_filled_in_again_gives_the_same_job(kind):
    needed = {"num_samples": 9, "dataset_ids": ["a"], "run_id": "r", "model": "unet_tiny", "seed": 5, "size": 64}
    known = config_schema(kind)
    given = {name: value for name, value in needed.items() if name in known["properties"]}
    if kind == "sequence.train":
        given = {"dataset_ids": ["a"], "seed": 5, "model": {"channels": 8}, "augmentation": {"noise": 0.2}}
    spec = read_body({"kind": kind, "name": "first", "config": given})

    values = {field.path: _again(field, spec.config) for field in fields(kind)}
    again = read_body({"kind": kind, "name": "first", "config": make_config(fields(kind), values)})

    assert again == spec
    assert read_body(job_body({"kind": kind, "name": "first", "config": spec.config})) == spec  # as it is copied


def _again(field: FormField, config: dict) -> object:
    found: object = config
    for name in field.path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    if found is None or found == field.default or (field.sort == "switch" and isinstance(found, dict)):
        return field.start
    return field.filled(found)


@pytest.mark.parametrize(
    ("named", "path"),
    [
        ("config.dataset_ids[0]", "dataset_ids"),
        ("config.stations[2].lat", "stations"),
        ("config.augmentation.noise", "augmentation.noise"),
        ("config.unknown", None),
        (None, None),
    ],
)
def test_a_refusal_is_shown_at_the_field_it_names(named, path):
    assert field_of(named, ["epochs", "dataset_ids", "stations", "augmentation.noise", "name"]) == path


# Tuning


def trial(batch: int, throughput: float, spread: float = 0.0, p50: int | None = None, peak: int | None = None) -> dict:
    known = {"kind": "sweep", "status": "ok", "p95_ms": None if p50 is None else p50 + 7}
    return {**known, "batch": batch, "throughput": throughput, "spread": spread, "p50_ms": p50, "peak_bytes": peak}


TRIALS = [
    trial(2, 20.0, 0.1, 90, 8),
    trial(2, 24.0, 0.0, 91, 9),
    trial(1, 15.0),
    {"kind": "sweep", "batch": 4, "throughput": 0.0, "status": "oom"},
    {"kind": "search", "batch": 2, "throughput": 50.0, "status": "ok"},
]


def test_repeated_trials_of_a_batch_are_one_with_their_spread():
    one, two = per_batch(TRIALS)

    assert (one["batch"], two["batch"]) == (1, 2)
    assert two["throughput"] == 22.0
    assert two["low"] == pytest.approx(19.8)
    assert two["high"] == pytest.approx(24.2)
    assert (two["p50_ms"], two["p95_ms"], two["peak_bytes"]) == (91, 98, 9)


def test_charts_leave_out_what_was_not_measured_and_mark_the_sizes():
    made = options_of(per_batch(TRIALS), {"optimal_batch_size": 1, "max_safe_batch_size": 2})

    speed, latency, memory = made.values()
    assert [point[0] for point in speed["series"][0]["data"]] == [1, 2]
    assert [point[0] for point in latency["series"][0]["data"]] == [2]
    assert memory["series"][0]["data"] == [[2, 9e-9]]
    assert [mark["name"] for mark in speed["series"][0]["markLine"]["data"]] == ["chosen", "safe"]
