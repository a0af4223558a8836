"""Jobs on several devices or on the service's cluster: what a request may ask for, and what only whoever serves may."""

from typing import Any

import pytest
from live_api import GENERATION, JOBS

from brim.errors import ConfigError
from brim.jobs.worker.process import cores
from brim.service.settings import Settings, from_options

VALIDATE = f"{JOBS}/validate"
ADDRESSES = ("ray://10.0.0.1:10001", "auto", "local", "10.0.0.1:6379", "http://10.0.0.1:8265", "", "true", 1, None, [])


def generation(**config: Any) -> dict[str, Any]:
    return {**GENERATION, "config": {**GENERATION["config"], **config}}


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_in_a_request_is_refused(shared, address):
    for body in (
        generation(cluster=address),
        {"kind": "segment.predict", "name": "n", "config": {"dataset_ids": ["x"], "run_id": "y", "cluster": address}},
    ):
        answer = shared.post(VALIDATE, body)

        assert (answer.status, answer.json["field"]) == (422, "config.cluster")
        assert "must be true or false" in answer.json["detail"]
        assert "10.0.0.1" not in answer.json["detail"]


@pytest.mark.parametrize("devices", [0, -1, 1.5, "2", "every", "ray://10.0.0.1:10001", True, None, [0, 1], 65])
def test_what_is_no_number_of_devices_is_refused(shared, devices):
    answer = shared.post(VALIDATE, generation(devices=devices))

    assert (answer.status, answer.json["field"]) == (422, "config.devices")


@pytest.mark.parametrize("name", ["address", "ray", "ray_address", "cluster_address", "out", "url"])
def test_no_field_takes_an_address_under_another_name(shared, name):
    answer = shared.post(VALIDATE, generation(**{name: "ray://10.0.0.1:10001"}))

    assert (answer.status, answer.json["field"]) == (422, f"config.{name}")


def test_a_cluster_that_the_service_does_not_have_is_refused_with_the_next_step(shared):
    answer = shared.post(VALIDATE, generation(cluster=True))

    assert (answer.status, answer.json["field"]) == (409, "config.cluster")
    assert "this service has no cluster" in answer.json["detail"]


def test_more_devices_than_the_machine_has_are_refused_with_how_many_it_has(shared):
    answer = shared.post(VALIDATE, generation(devices=64))

    assert (answer.status, answer.json["field"]) == (409, "config.devices")
    assert f"give at most {cores()}" in answer.json["detail"]


def test_devices_of_a_gpu_machine_are_its_gpus(api_with):
    with api_with(gpus=("0", "1", "2")) as api:
        assert api.post(VALIDATE, generation(devices=3)).status == 200
        answer = api.post(VALIDATE, generation(devices=4))

        assert "more than the 3 GPUs of this machine" in answer.json["detail"]


@pytest.mark.parametrize("devices", [1, cores(), "all"])
def test_a_job_keeps_how_many_devices_it_asked_for(shared, devices):
    answer = shared.post(VALIDATE, generation(devices=devices))

    assert answer.status == 200, answer.json
    assert answer.json["config"]["devices"] == devices
    assert answer.json["config"]["cluster"] is False


def test_a_job_may_ask_for_the_cluster_that_the_service_has(api_with):
    with api_with(cluster="ray://10.0.0.1:10001") as api:
        answer = api.post(JOBS, generation(cluster=True))

        assert answer.status == 202, answer.json
        assert answer.json["config"]["cluster"] is True
        assert "10.0.0.1" not in answer.body.decode()
        both = api.post(VALIDATE, generation(cluster=True, devices=2))
        assert (both.status, both.json["field"]) == (409, "config.devices")


def test_no_path_or_url_is_a_dataset_of_a_request(shared):
    for place in ("s3://bucket/data", "file:///etc", "../x", "/etc/passwd"):
        body = {"job_name": "t", "config": {"dataset_ids": [place], "epochs": 1}}

        assert shared.post(VALIDATE, body).status in (404, 422)


# Settings


@pytest.mark.parametrize("address", ["auto", "ray://10.0.0.1:10001", "ray://head", "ray://[fd00::1]:10001"])
def test_a_service_takes_the_address_of_a_cluster(tmp_path, address):
    settings = from_options(data=tmp_path, cluster=address, gpus=("0", "1"), environ={})

    assert Settings.from_json(settings.to_json()) == settings
    assert settings.cluster == address


@pytest.mark.parametrize(
    "address", ["http://x", "10.0.0.1:6379", "ray://", "ray://user:secret@host:1", "ray://a b", "x"]
)
def test_what_is_no_address_is_refused(tmp_path, address):
    with pytest.raises(ConfigError, match="is not an address; use auto or ray://HOST:PORT"):
        from_options(data=tmp_path, cluster=address, environ={})


def test_the_environment_may_name_the_cluster(tmp_path):
    assert from_options(data=tmp_path, environ={"BRIM_CLUSTER": "auto"}).cluster == "auto"
