"""A job checked without being submitted, and the kinds of jobs with the schemas of their configs."""

from typing import Any

import jsonschema_rs
from live_api import GENERATION, JOBS, TRAINING

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


def test_what_could_run_is_answered_in_full_and_nothing_is_stored(api):
    answer = api.post(VALIDATE, GENERATION)

    assert answer.status == 200
    assert answer.json.keys() == {"kind", "name", "config", "estimated_bytes", "estimated_seconds"}
    assert (answer.json["kind"], answer.json["name"]) == ("rf.generate", "gpu_batch_test")
    assert api.get(JOBS).json["total"] == 0
    assert api.get("/api/datasets").json["total"] == 0
    assert answer.json["config"] == api.submit()["config"], "it is what submitting makes of it"
    fewer = api.post(VALIDATE, {**GENERATION, "num_samples": 1000}).json["estimated_bytes"]
    assert 1000 * 100 < 9 * fewer < answer.json["estimated_bytes"] < 11 * fewer, "more samples take more disk"


def test_a_training_body_that_fits_its_dataset_is_taken(api):
    config = {**TRAINING["config"], "dataset_ids": [api.write_dataset("good", 20)]}

    job = api.submit({**TRAINING, "config": config})

    assert (job["kind"], job["name"], job["status"]) == ("rf.train", "GPU Cache Test", "queued")
    assert (job["config"]["epochs"], job["config"]["batch_size"], job["config"]["val_share"]) == (1000, 256, 0.1)
    assert job["config"]["dataset_ids"] == config["dataset_ids"]
    assert api.get("/api/runs").json["runs"][0]["state"] == "training"


def test_every_kind_is_listed_with_what_it_reads_and_makes(shared):
    kinds = {kind["kind"]: kind for kind in shared.get(KINDS_PATH).json["kinds"]}

    assert kinds.keys() == KINDS.keys() == LEAST.keys()
    assert {name: (kind["makes"], kind["reads"], kind["reads_run"]) for name, kind in kinds.items()} == {
        "rf.generate": ("dataset", None, None),
        "rf.train": ("run", "rf", None),
        "rf.evaluate": ("result", "rf", "rf.train"),
        "rf.measure": ("result", "recordings", None),
        "segment.tune": ("result", None, "segment.train"),
        "segment.predict": ("result", "images", "segment.train"),
        "segment.train": ("run", "images", "segment.train"),
        "sequence.train": ("run", "sequences", None),
        "sequence.evaluate": ("result", "sequences", "sequence.train"),
    }


def test_a_schema_takes_what_submitting_takes_and_its_defaults_are_what_nothing_given_means(shared):
    for kind in shared.get(KINDS_PATH).json["kinds"]:
        validator, least = jsonschema_rs.validator_for(kind["schema"]), LEAST[kind["kind"]]
        properties = kind["schema"]["properties"]

        validator.validate(least)
        assert not validator.is_valid({**least, "unknown": 1})
        for name in least:
            assert not validator.is_valid({key: value for key, value in least.items() if key != name})
        assert {name for name, field in properties.items() if "default" not in field} == set(least), kind["kind"]
        filled = {name: field["default"] for name, field in properties.items() if "default" in field}
        validator.validate({**filled, **least})
        assert KINDS[kind["kind"]].resolve({**filled, **least}) == KINDS[kind["kind"]].resolve(least), kind["kind"]
        assert "$ref" not in str(kind["schema"])


def test_the_presets_of_generation_are_values_of_its_fields(shared):
    kinds = {kind["kind"]: kind for kind in shared.get(KINDS_PATH).json["kinds"]}
    presets = kinds["rf.generate"]["presets"]

    assert presets.keys() == {"production", "quality", "valley", "city", "amateur", "hostile"}
    for name, values in presets.items():
        by_hand = shared.post(VALIDATE, {**GENERATION, "config": values}).json["config"]
        by_name = shared.post(VALIDATE, {**GENERATION, "config": {"preset": name}}).json["config"]
        assert by_hand == by_name
    assert all(kind["presets"] == {} for name, kind in kinds.items() if name != "rf.generate")


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
