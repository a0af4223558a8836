"""A job checked without being submitted: the same answer to every body, and nothing is left behind."""

from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from live_api import GENERATION, JOBS, TRAINING, Api

from brim.jobs.kinds import KINDS

VALIDATE = f"{JOBS}/validate"
KINDS_PATH = "/api/training/kinds"
LEAST: dict[str, dict[str, Any]] = {  # of every kind, what cannot be left out
    "rf.generate": {"num_samples": 5},
    "rf.train": {"dataset_ids": ["a"]},
    "rf.evaluate": {"dataset_ids": ["a"], "run_id": "b"},
    "rf.measure": {"dataset_ids": ["a"]},
    "segment.tune": {},
    "segment.predict": {"dataset_ids": ["a"], "run_id": "b"},
    "segment.train": {"dataset_ids": ["a"], "model": "unet_tiny"},
    "sequence.train": {"dataset_ids": ["a"]},
    "sequence.evaluate": {"dataset_ids": ["a"], "run_id": "b"},
}


def write_dataset(api: Api, name: str, samples: int = 8, **config: Any) -> str:
    """A dataset of radio samples as the command line adds one; its id."""
    from brim.rf import from_mapping
    from brim.rf.generation.dataset import generate

    generate(from_mapping(config), api.settings.data / "datasets" / name, samples, device="cpu")
    return api.add_dataset(name=name, path=f"datasets/{name}", items=samples).id


def test_what_could_run_is_answered_in_full_and_nothing_is_stored(api):
    answer = api.post(VALIDATE, GENERATION)

    assert answer.status == 200
    assert answer.json.keys() == {"kind", "name", "config", "estimated_bytes", "estimated_seconds"}
    assert (answer.json["kind"], answer.json["name"]) == ("rf.generate", "gpu_batch_test")
    assert answer.json["estimated_bytes"] > 10_000 * 100, "10 000 samples of features"
    assert api.get(JOBS).json["total"] == 0
    assert api.get("/api/datasets").json["total"] == 0
    assert answer.json["config"] == api.submit()["config"], "it is what submitting makes of it"


def test_more_samples_take_more_disk(api):
    def bytes_of(samples: int) -> int:
        return int(api.post(VALIDATE, {**GENERATION, "num_samples": samples}).json["estimated_bytes"])

    assert 9 * bytes_of(1000) < bytes_of(10_000) < 11 * bytes_of(1000)


def bodies(api: Api) -> dict[str, Any]:
    """Bodies that are refused, one for each reason there is."""
    good, other = write_dataset(api, "good"), write_dataset(api, "other", waveform="am")
    images = api.add_dataset(name="pictures", kind="images", path="datasets/pictures").id
    empty = api.add_dataset(name="empty", path="datasets/empty", items=0).id
    gone = api.add_dataset(name="gone", path="datasets/gone").id
    writing = api.submit()
    being_written = api.catalogue.jobs.get(writing["id"]).output_id
    train = {"kind": "rf.train", "name": "t"}
    return {
        "no object": [],
        "no kind": {"name": "x"},
        "unknown kind": {"kind": "rf.trian", "name": "x", "config": {}},
        "unknown field": {**GENERATION, "config": {"frequency_mzh": 145}},
        "out of range": {**GENERATION, "config": {"frequency_mhz": 0.003}},
        "in conflict": {**GENERATION, "config": {"min_receivers": 9}},
        "unknown dataset": {**train, "config": {"dataset_ids": ["f" * 32]}},
        "no id": {**train, "config": {"dataset_ids": ["../../etc"]}},
        "other kind": {**train, "config": {"dataset_ids": [images]}},
        "empty": {**train, "config": {"dataset_ids": [empty]}},
        "files gone": {**train, "config": {"dataset_ids": [gone]}},
        "being written": {**train, "config": {"dataset_ids": [being_written]}},
        "twice": {**train, "config": {"dataset_ids": [good, good]}},
        "not together": {**train, "config": {"dataset_ids": [good, other]}},
        "too few to hold out": {**train, "config": {"dataset_ids": [good], "val_share": 0.99}},
        "unknown run": {"kind": "rf.evaluate", "name": "e", "config": {"dataset_ids": [good], "run_id": "f" * 32}},
        "no GPU": {**GENERATION, "config": {"accelerator": "gpu"}},
    }


def test_what_submitting_would_refuse_is_refused_in_the_same_words(api):
    api.catalogue.devices.put("w0", {"device": "cpu"})
    for reason, body in bodies(api).items():
        checked, submitted = api.post(VALIDATE, body), api.post(JOBS, body)

        assert checked.status == submitted.status >= 400, reason
        assert checked.json == submitted.json, reason
    assert api.get(JOBS).json["total"] == 1, "the one that writes a dataset"


def test_all_wrong_fields_are_answered_at_once(shared):
    config = {"num_samples": 5, "seed": "x", "frequency_mzh": 145, "tx_power_dbm": 900}
    answer = shared.post(JOBS, {"kind": "rf.generate", "name": "x", "config": config})

    assert answer.status == 422
    assert [one["field"] for one in answer.json["errors"]] == [
        "config.frequency_mzh", "config.seed", "config.tx_power_dbm"
    ]  # fmt: skip
    assert answer.json["detail"] == answer.json["errors"][0]["detail"]


@pytest.mark.parametrize("named", ["/srv/net.py:make", "net.py:make", "net.pt2", "/srv/net.pt2@0123456789abcdef"])
def test_a_request_names_no_file_of_code(shared, named):
    """Code and programs are for the administrator, on the machine."""
    train = {"dataset_ids": ["a" * 32], "model": named}
    for kind, config in {
        "segment.train": train,
        "segment.tune": {"models": [named]},
        "segment.predict": {"dataset_ids": ["a" * 32], "run_id": "b" * 32, "model": named},
        "sequence.train": {"dataset_ids": ["a" * 32], "network": named},
    }.items():
        for path in (VALIDATE, JOBS):
            answer = shared.post(path, {"kind": kind, "name": "x", "config": config})
            assert answer.status == 422, (kind, answer.json)


@pytest.mark.parametrize("sent", [b"{", b'{"kind": "rf.train", "kind": "x"}', b"\xff"])
def test_a_body_that_is_no_json_is_refused_in_the_same_words(shared, sent):
    headers = {"Content-Type": "application/json"}
    checked, submitted = (shared.post(path, sent, headers=headers) for path in (VALIDATE, JOBS))

    assert checked.status == submitted.status == 400
    assert checked.json == submitted.json
    assert shared.post(VALIDATE, b"{}", headers={"Content-Type": "text/plain"}).status == 415


def test_a_full_disk_is_refused_in_the_same_words(api, monkeypatch, tmp_path: Path):
    (tmp_path / "free").write_text(str(3 * 2**20))
    monkeypatch.setenv("BRIM_FREE_BYTES_FILE", str(tmp_path / "free"))
    body = {**GENERATION, "num_samples": 1_000_000}

    checked, submitted = api.post(VALIDATE, body), api.post(JOBS, body)

    assert checked.status == submitted.status == 409
    assert checked.json == submitted.json


def test_checking_needs_no_room_among_the_waiting(api_with):
    with api_with(max_unfinished=1) as api:
        api.submit()

        assert api.post(JOBS, GENERATION).status == 429
        assert api.post(VALIDATE, GENERATION).status == 200


def test_a_training_body_that_fits_its_dataset_is_taken(api):
    body = {**TRAINING, "config": {**TRAINING["config"], "dataset_ids": [write_dataset(api, "good", 20)]}}

    answer = api.post(VALIDATE, body)

    assert answer.status == 200
    assert answer.json["config"]["val_share"] == 0.1


# Kinds


def test_every_kind_is_listed_with_what_it_reads_and_makes(shared):
    kinds = {kind["kind"]: kind for kind in shared.get(KINDS_PATH).json["kinds"]}

    assert kinds.keys() == KINDS.keys()
    for name, kind in kinds.items():
        assert kind.keys() == {
            *("kind", "title", "description", "makes", "reads", "reads_run", "schema", "presets"),
        }
        assert (kind["makes"], kind["reads"], kind["reads_run"]) == (
            *(KINDS[name].makes, KINDS[name].reads, KINDS[name].reads_run),
        )
        assert 5 < len(kind["title"]) < 30
        assert kind["description"].endswith(".")
    assert len({kind["title"] for kind in kinds.values()}) == len(kinds)


def test_the_schemas_take_what_submitting_takes_and_refuse_the_rest(shared):
    for kind in shared.get(KINDS_PATH).json["kinds"]:
        validator, least = jsonschema_rs.validator_for(kind["schema"]), LEAST[kind["kind"]]

        validator.validate(least)
        assert not validator.is_valid({**least, "unknown": 1})
        for name in least:
            assert not validator.is_valid({key: value for key, value in least.items() if key != name})
        assert "$ref" not in str(kind["schema"])


def test_a_form_filled_with_the_defaults_is_what_nothing_given_means(shared):
    """A page that sends every field as the schema has it asks for the same job as one that sends none."""
    for kind in shared.get(KINDS_PATH).json["kinds"]:
        properties, least = kind["schema"]["properties"], LEAST[kind["kind"]]
        assert {name for name, field in properties.items() if "default" not in field} == set(least), kind["kind"]
        filled = {name: field["default"] for name, field in properties.items() if "default" in field}

        jsonschema_rs.validator_for(kind["schema"]).validate({**filled, **least})
        assert KINDS[kind["kind"]].resolve({**filled, **least}) == KINDS[kind["kind"]].resolve(least), kind["kind"]


def test_the_presets_of_generation_are_values_of_its_fields(shared):
    kinds = {kind["kind"]: kind for kind in shared.get(KINDS_PATH).json["kinds"]}
    presets = kinds["rf.generate"]["presets"]

    assert presets.keys() == {"production", "quality", "valley", "city", "amateur", "hostile"}
    for name, values in presets.items():
        by_hand = shared.post(VALIDATE, {**GENERATION, "config": values}).json["config"]
        by_name = shared.post(VALIDATE, {**GENERATION, "config": {"preset": name}}).json["config"]
        assert by_hand == by_name
    assert all(kind["presets"] == {} for name, kind in kinds.items() if name != "rf.generate")


# Filters


def test_jobs_are_found_by_a_part_of_their_name(api):
    for name in ("Night 100%", "night_2", "day"):
        api.submit({**GENERATION, "dataset_name": name})

    def found(query: str) -> list[str]:
        return [job["name"] for job in api.get(f"{JOBS}?{query}").json["jobs"]]

    assert found("name=night") == ["night_2", "Night 100%"]
    assert found("name=%25") == ["Night 100%"], "no pattern"
    assert found("name=t_2") == ["night_2"]
    assert found("name=night&kind=rf.train") == []
    assert len(found("name=")) == 3
    assert api.get(f"{JOBS}?name={'x' * 201}").status == 422


def test_the_address_of_checks_says_which_method_it_takes(shared):
    answer = shared.ask("PUT", VALIDATE)

    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert shared.ask("PUT", f"{JOBS}/{'0' * 32}").headers["allow"] == "DELETE, GET"
