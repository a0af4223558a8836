"""Requests for positions: what `locate` says, whatever else is in the batch."""

import json
from pathlib import Path

import pytest
import torch
from small_dataset import write_dataset

from brim.engine.batching.servable import Answer, Payload
from brim.errors import ConfigError, TooLarge
from brim.rf.config import GenerateConfig, LocatorTraining
from brim.rf.features import FEATURES, STATISTICS
from brim.rf.location import train
from brim.rf.location.run import locate
from brim.rf.location.serving import LocateServable

CPU = torch.device("cpu")
CONFIG = GenerateConfig(duration_s=0.2, tx_power_dbm=45.0, seed=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, and the observations of its dataset as people would write them."""
    path = tmp_path_factory.mktemp("serving")
    rows = write_dataset(path / "data", CONFIG, attempts=32, shard=16)
    train([path / "data"], path / "run", LocatorTraining(epochs=2, batch_size=16, learning_rate=0.01), device="cpu")
    (path / "all.json").write_text(json.dumps([observation(rows, n) for n in range(len(rows["present"]))]))
    return path


@pytest.fixture(scope="module")
def servable(made):
    return LocateServable(made / "run", CPU)


def observation(rows, n: int) -> dict:
    """A sample without its padding."""
    here = rows["present"][n].nonzero().flatten().tolist()
    stations = []
    for receiver in here:
        lat, lon, alt = rows["receivers"][n, receiver].tolist()
        values = rows["features"][n, receiver].tolist()
        features = {
            name: dict(zip(STATISTICS, values[number], strict=True)) for number, (name, _) in enumerate(FEATURES)
        }
        stations.append({"name": str(receiver), "lat": lat, "lon": lon, "alt": alt, "features": features})
    return {"id": f"sample {n}", "reference": str(int(rows["reference"][n])), "stations": stations}


def observations(made: Path) -> list[dict]:
    return json.loads((made / "all.json").read_text())


def payload(value: object) -> Payload:
    return Payload(memoryview(json.dumps(value).encode()), "request")


def run(servable: LocateServable, payloads: list[Payload], size: int = 64) -> list[Answer]:
    """Answers of requests whose parts share batches wherever they may."""
    items = [servable.decode(one) for one in payloads]
    outputs: dict[int, dict[int, object]] = {id(item): {} for item in items}
    for key in dict.fromkeys(item.key for item in items):
        waiting = [(item, n) for item in items if item.key == key for n in range(len(item.parts))]
        while waiting:
            batch, waiting = waiting[:size], waiting[size:]
            found = servable.collect(servable.forward([item.parts[n] for item, n in batch]))
            for (item, n), output in zip(batch, found, strict=True):
                outputs[id(item)][n] = output
    return [servable.finish(item, [outputs[id(item)][n] for n in range(len(item.parts))]) for item in items]


def assert_like(found: bytes, expected: dict, tolerance: float = 1e-3) -> None:
    """The same positions up to a thousandth of the uncertainty, and regions of the same extent."""
    features = json.loads(found)["features"]
    assert len(features) == len(expected["features"])
    sigma_deg = 1.0
    for one, other in zip(features, expected["features"], strict=True):
        assert one["properties"]["id"] == other["properties"]["id"]
        if "sigma_east_m" in other["properties"]:
            sigma_deg = other["properties"]["sigma_north_m"] / 111e3
            assert one["properties"]["sigma_north_m"] == pytest.approx(other["properties"]["sigma_north_m"], rel=1e-3)
        a, b = (extent(each["geometry"]["coordinates"]) for each in (one, other))
        if other["geometry"]["type"] != "Point":
            tolerance = 0.1  # of a grid on which small parts may appear or not
        assert float((a - b).abs().max()) < 4 * tolerance * sigma_deg + 1e-5  # a metre where all is float32


def extent(coordinates: list) -> torch.Tensor:
    """West, south, east and north of however nested coordinates."""
    points = torch.tensor(list(flat(coordinates)), dtype=torch.float64).reshape(-1, 2)
    return torch.cat([points.amin(0), points.amax(0)])


def flat(coordinates):
    for one in coordinates:
        yield from flat(one) if isinstance(one, list) else (one,)


# What is answered


def test_an_answer_is_what_locate_says(made, servable):
    (found,) = run(servable, [payload({"observations": observations(made)[:8]})])

    (made / "some.json").write_text(json.dumps(observations(made)[:8]))
    assert_like(found.body, locate(made / "run", made / "some.json"))
    assert found.media_type == "application/geo+json"
    assert found.facts["observations"] == 8
    about = json.loads(found.body)["features"][0]["properties"]
    assert about["stations"] == [station["name"] for station in observations(made)[0]["stations"]]
    assert about["left_out"] == []
    assert {"region_km2", "modes"} <= about.keys()


def test_a_batch_answers_as_each_alone(made, servable):
    payloads = [payload(one) for one in observations(made)[:12]]

    together = run(servable, payloads, size=5)

    for one, found in zip(payloads, together, strict=True):
        assert_like(found.body, json.loads(run(servable, [one])[0].body))


# What is told before


@pytest.mark.parametrize("counts", [[3], [4, 5], [9, 3, 8]])
def test_the_number_of_stations_tells_what_decoding_finds(servable, counts):
    stations = [
        {"lat": 47 + n / 50, "lon": 8 + n % 3 / 10, "alt": 1, "rssi_dbm": -80, "arrival_difference_us": n}
        for n in range(9)
    ]
    request = payload([{"stations": stations[:count]} for count in counts])

    shape, item = servable.inspect(request), servable.decode(request)

    assert (shape.key, shape.parts) == (item.key, len(item.parts))
    assert item.parts[0]["present"].shape == ({3: 4, 5: 8, 9: 16}[max(counts)],)


@pytest.mark.parametrize("data", [b"{", b"[" * 100_000, b"\xff"])
def test_what_is_no_json_is_refused_at_once(servable, data):
    with pytest.raises(ConfigError, match="not valid JSON"):
        servable.inspect(Payload(data, "request"))


@pytest.mark.parametrize("value", [None, {"observations": []}, {"stations": [{"lat": 95}] * 3}])
def test_what_is_no_observation_is_refused_in_words(servable, value):
    servable.inspect(payload(value))
    with pytest.raises(ConfigError, match="request"):
        servable.decode(payload(value))


def test_more_stations_than_any_network_of_them_are_refused(servable):
    with pytest.raises(TooLarge, match="257 stations, at most 256"):
        servable.inspect(payload([{"stations": [{}] * 3}, {"stations": [{}] * 257}]))
    servable.inspect(payload([{"stations": [{}] * 256}]))


def test_numbers_that_lead_to_no_position_are_refused(made, servable):
    one = observations(made)[0]
    item = servable.decode(payload(one))
    ((position, _, *others),) = servable.collect(servable.forward(item.parts))
    bad = (position, torch.full((2, 2), torch.nan), *others)

    with pytest.raises(ConfigError, match='"sample 0" has no position'):
        servable.finish(item, [bad])


# Loading


def test_two_versions_never_share_a_batch(made, servable):
    other = LocateServable(made / "run", CPU)
    request = payload(observations(made)[0])

    assert other.inspect(request).key != servable.inspect(request).key
    assert other.decode(request).key != servable.decode(request).key
