"""Bodies of requests become specs with every default filled in, or one sentence with the field's name."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.config import settings as setting_names
from brim.errors import BrimError
from brim.jobs.kinds import KINDS, Spec, body_schema, config_schema, read_body

GENERATION = {
    "dataset_name": "gpu_batch_test",
    "num_samples": 10000,
    "dataset_type": "feature_based",
    "config": {"frequency_mhz": 145.0, "tx_power_dbm": 30.0, "min_snr_db": 3.0, "max_gdop": 100.0},
}
TRAINING = {
    "job_name": "GPU Cache Test",
    "config": {
        "dataset_ids": ["…"],
        "batch_size": 256,
        "epochs": 1000,
        "learning_rate": 0.001,
        "preload_to_gpu": True,
        "accelerator": "auto",
    },
}
IDS = {"dataset_ids": ["a" * 32]}
RUN = {"run_id": "b" * 32}
LEAST = {  # of every kind, what cannot be left out
    "rf.generate": {"num_samples": 5},
    "rf.train": IDS,
    "rf.evaluate": IDS | RUN,
    "rf.measure": IDS,
    "segment.tune": {},
    "segment.predict": IDS | RUN,
    "segment.train": IDS | {"model": "unet_tiny"},
    "sequence.train": IDS,
    "sequence.evaluate": IDS | RUN,
}


def explicit(kind, **config):
    return {"kind": kind, "name": "a job", "config": LEAST[kind] | config}


def generation(**config):
    return {"dataset_name": "a", "num_samples": 10, "config": config}


def training(**config):
    return {"job_name": "a", "config": IDS | config}


def refused(body):
    with pytest.raises(BrimError) as caught:
        read_body(body)
    str(caught.value).encode(), caught.value.field.encode()  # an answer must hold them
    return caught.value


# What is accepted


@pytest.mark.parametrize("body", [generation(), training(), explicit("rf.generate"), explicit("sequence.train")])
def test_devices_stand_beside_the_config_or_in_it(body):
    inside = {**body, "config": {**body["config"], "devices": 2}}

    assert read_body({**body, "devices": 2}) == read_body(inside) == read_body({**inside, "devices": 2})
    assert read_body({**body, "devices": 2}).config["devices"] == 2


def test_a_cluster_is_asked_for_beside_the_config_or_in_it_and_never_named():
    assert read_body({**generation(), "cluster": True}).config["cluster"] is True
    for name in ("cluster", "devices"):
        assert refused({**generation(), name: "ray://10.0.0.1:10001"}).field == name


def test_the_two_bodies_that_people_know_are_taken_verbatim():
    generated, trained = read_body(GENERATION), read_body(TRAINING)

    assert (generated.kind, generated.name, generated.dataset_ids) == ("rf.generate", "gpu_batch_test", ())
    assert generated.config.items() >= {"num_samples": 10000, "tx_power_dbm": 30.0, "max_gdop": 100.0}.items()
    assert generated.config["min_receivers"] == 3  # a default, filled in
    assert (trained.kind, trained.name, trained.dataset_ids) == ("rf.train", "GPU Cache Test", ("…",))
    assert trained.config.items() >= {"batch_size": 256, "epochs": 1000, "preload_to_gpu": True}.items()


def test_settings_that_follow_from_others_are_filled_in():
    def config(body):
        return read_body(body).config

    preset = config(generation(preset="quality", max_gdop=30.0))
    assert (preset["min_snr_db"], preset["max_gdop"], preset["use_random_receivers"]) == (10.0, 30.0, True)
    assert "preset" not in preset  # its values are there
    assert config(training())["preload_to_gpu"] is True
    assert config(training(tier="ram"))["preload_to_gpu"] is None
    tiers = [config(explicit("segment.train", preload_to_gpu=wanted))["tier"] for wanted in (None, False)]
    assert tiers == ["auto", "ram"]
    phases = config(explicit("sequence.train", epochs=3, encoder_epochs=5))
    assert (phases["encoder_epochs"], phases["classifier_epochs"]) == (5, 3)
    assert config(explicit("sequence.train", folds=3))["mode"] == "supervised"
    assert config({**generation(samples_per_shard=5), "num_samples": 5_000_000})["num_samples"] == 5_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_needs_little_and_can_be_asked_for_again_by_what_it_shows(kind):
    spec = read_body(explicit(kind))

    again = json.loads(json.dumps({"kind": spec.kind, "name": spec.name, "config": spec.config}, allow_nan=False))
    assert read_body(again) == spec == Spec(kind, "a job", spec.config)


# What is refused


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ([], "", "must be an object"),
        ({}, "kind", "give kind, or dataset_name and num_samples, or job_name"),
        ({"jobname": 1}, "jobname", "jobname is unknown; did you mean job_name?"),
        ({**GENERATION, "samples": 5}, "samples", "samples is unknown; did you mean num_samples?"),
        (generation(frequency_mhzz=5.0), "config.frequency_mhzz", "did you mean frequency_mhz?"),
        (training(dataset_id=["/data"]), "config.dataset_id", "did you mean dataset_ids?"),
        (
            explicit("segment.train", augmentation={"noize": 1}),
            "config.augmentation.noize",
            "config.augmentation.noize is unknown; did you mean noise?",
        ),
        (explicit("sequence.train", encoder="/srv/run"), "config.encoder", "is unknown"),  # no request names a path
        (
            generation(stations=[{"name": "a", "lat": 1, "lon": 2, "alt": 3, "path": "/x"}]),
            "config.stations[0].path",
            "is unknown",
        ),
        ({"kind": "rf.generat", "name": "a", "config": {}}, "kind", "did you mean rf.generate?"),
        ({"kind": ["rf.train"], "name": "a"}, "kind", "is unknown"),
    ],
)
def test_what_is_unknown_is_named_with_what_was_meant(body, field, words):
    failure = refused(body)

    assert failure.field == field
    assert words in str(failure)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"num_samples": 5}, "dataset_name"),
        ({"dataset_name": "a"}, "num_samples"),
        ({"job_name": "a", "config": {}}, "config.dataset_ids"),
        ({"config": IDS}, "job_name"),
        ({"kind": "segment.train", "name": "a", "config": IDS}, "config.model"),
        (generation(stations=[{"name": "a"}]), "config.stations[0].lat"),
    ],
)
def test_what_is_missing_is_named(body, field):
    failure = refused(body)

    assert failure.field == field
    assert str(failure) == f"{field} is missing"


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({**GENERATION, "num_samples": 10**9 + 1}, "num_samples", "out_of_range"),
        (generation(seed=-1), "config.seed", "out_of_range"),
        (training(accelerator="tpu"), "config.accelerator", "unknown_choice"),
        (training(dataset_ids=[5]), "config.dataset_ids[0]", "wrong_type"),
        (training(dataset_ids=["a", "b", "a"]), "config.dataset_ids[2]", "repeated"),
        # right by themselves, but not together
        ({**GENERATION, "num_samples": 10**9}, "num_samples", "conflict"),
        (explicit("rf.generate", num_samples=10**9), "config.num_samples", "conflict"),
        ({**generation(samples_per_shard=5), "num_samples": 5_000_001}, "num_samples", "conflict"),
        (generation(min_receivers=9), "config.min_receivers", "conflict"),
        (generation(devices=2, cluster=True), "config.devices", "conflict"),
        ({**generation(devices=3), "devices": 2}, "devices", "conflict"),
        ({**generation(cluster=True), "cluster": False}, "cluster", "conflict"),
        ({**generation(dataset_type="feature_based"), "dataset_type": "iq_raw"}, "dataset_type", "conflict"),
        (training(tier="ram", preload_to_gpu=True), "config.preload_to_gpu", "conflict"),
        (training(tier="vram", preload_to_gpu=False), "config.preload_to_gpu", "conflict"),
        (explicit("segment.tune", model="hrnet", models=["hrnet"]), "config.model", "conflict"),
        (explicit("segment.tune", **RUN), "config.run_id", "conflict"),
        (explicit("sequence.train", augmentation=None), "config.augmentation", "conflict"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_its_field(body, field, code):
    failure = refused(body)

    assert (failure.field, failure.code) == (field, code)


@pytest.mark.parametrize("name", ["", " ", "a\0b", "\x1b[31m", "\ud800", "x" * 201])
def test_names_can_be_printed_and_stored_and_others_can_be_answered(name):
    assert refused({**GENERATION, "dataset_name": name}).field == "dataset_name"
    assert refused(training(dataset_ids=[name])).field == "config.dataset_ids[0]"
    refused(generation(**{name: 1}))
    refused({name: 1})


_LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["auto", "hrnet", "/etc/passwd", "\ud800", "\0", 2**63, 10**400, "ram"])
)  # fmt: skip
_JSON = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), value=_JSON, data=st.data())
def test_whatever_a_field_holds_it_is_taken_or_refused_by_name(kind, value, data):
    field = data.draw(st.sampled_from([*setting_names(KINDS[kind].config), "other"]))
    spec, said = None, ("config", "")
    try:
        spec = read_body(explicit(kind, **{field: value}))
    except BrimError as failure:
        said = (failure.field, str(failure))

    assert said[0].startswith("config")
    assert "\n" not in said[1].encode().decode()
    assert spec is None or field != "other"
    assert spec is None or "\\u0000" not in json.dumps(spec.config, allow_nan=False)


# The schema


def fields(schema, within=""):
    """Every field of a schema, nested ones with a dot."""
    for name, part in schema.get("properties", {}).items():
        yield f"{within}{name}", part
        for inner in (part, part.get("items", {}), *part.get("anyOf", ())):
            yield from fields(inner, f"{within}{name}.")


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_sentence_a_type_and_a_default_unless_it_is_required(kind):
    schema = config_schema(kind)

    for name, part in fields(schema):
        assert part["description"].endswith("."), name
        assert "type" in part or "anyOf" in part, name
    assert {name for name, part in schema["properties"].items() if "default" not in part} == set(schema["required"])


def test_the_schema_of_bodies_holds_all_forms_and_is_complete_in_itself():
    schema = body_schema()
    forms = {form["title"]: form["properties"] for form in schema["oneOf"]}

    assert list(forms)[:3] == ["GenerationRequest", "TrainingRequest", "RfGenerateRequest"]
    assert len(forms) == 2 + len(KINDS)
    assert "$ref" not in json.dumps(schema, allow_nan=False)
    assert all(form["additionalProperties"] is False for form in schema["oneOf"])
    assert forms["GenerationRequest"]["num_samples"] == config_schema("rf.generate")["properties"]["num_samples"]
    assert "num_samples" not in forms["GenerationRequest"]["config"]["properties"]
    assert forms["SegmentTrainRequest"]["config"]["properties"] == config_schema("segment.train")["properties"]


@pytest.mark.parametrize("body", [GENERATION, TRAINING, *map(explicit, KINDS)])
def test_the_schema_takes_what_is_taken(body):
    jsonschema = pytest.importorskip("jsonschema")

    jsonschema.validate(body, body_schema())


def test_what_an_api_process_imports_loads_no_torch_no_numpy_and_no_opencv():
    modules = "brim.jobs.kinds, brim.jobs.store, brim.jobs.durable, brim.jobs.registry.datasets, brim.jobs.worker.disk"
    code = f"import sys, {modules}; print(sorted(sys.modules.keys() & {{'torch', 'numpy', 'cv2'}}))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
