"""Datasets to look at over HTTP: figures of every kind, and one radio sample with its spectra."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_api import Api, Part, array, picture
from test_datasets_api import NAMED, SEQUENCES, upload

from brim.engine.storage import Dataset
from brim.rf import from_mapping, preset
from brim.rf.datasets import summary
from brim.rf.datasets.summary import named_columns
from brim.rf.generation.dataset import generate
from brim.service.reader import functions

SAMPLES = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small radio datasets by what is special about them."""
    folder = tmp_path_factory.mktemp("made")
    short = {"duration_s": 0.2, "samples_per_shard": 5}
    configs = {
        "fixed": from_mapping(short),
        "iq": from_mapping({**short, "dataset_type": "iq_raw"}),
        "random": preset("quality", duration_s=0.2),
    }
    for name, config in configs.items():
        generate(config, folder / name, 3 if name == "iq" else SAMPLES, device="cpu")
    return {name: folder / name for name in configs}


def bring(api: Api, path: Path, **values: Any) -> str:
    return api.add_dataset(**{"name": "brought", "path": str(path), "owned": False, "items": SAMPLES, **values}).id


def figures(api: Api, id: str) -> dict[str, Any]:
    answer = api.get(f"/api/datasets/{id}/statistics")
    assert answer.status == 200, answer.json
    return dict(answer.json)


def column(data: Dataset, key: str, name: str) -> Any:
    values = data.load((key,))[key].numpy()[:, :, [known for known, _ in named_columns(data.manifest, key)].index(name)]
    return values[..., 0] if values.ndim == 3 else values


# Radio


def test_figures_agree_with_the_rows(api, made):
    data = Dataset(made["fixed"])
    rows = {name: tensor.numpy() for name, tensor in data.load(("transmitter", "present", "gdop", "crlb_m")).items()}
    snr_db = column(data, "features", "snr_db")

    found = figures(api, bring(api, made["fixed"]))

    assert (found["kind"], found["samples"], found["complete"]) == ("rf", SAMPLES, True)
    assert found["attempted"] == SAMPLES + sum(found["rejected"].values())
    assert found["acceptance_rate"] == pytest.approx(SAMPLES / found["attempted"])
    assert [one["name"] for one in found["receivers"]][:2] == ["Aquila di Giaveno", "Montanaro"]
    assert found["receivers"][0] == {"name": "Aquila di Giaveno", "lat": 45.03, "lon": 7.27, "alt_m": 600.0}
    expected = {"snr_db": snr_db[rows["present"]], "gdop": rows["gdop"], "crlb_m": rows["crlb_m"]}
    assert {name: one["unit"] for name, one in found["histograms"].items()} == {
        "snr_db": "dB", "gdop": "1", "crlb_m": "m",
    }  # fmt: skip
    for name, values in expected.items():
        histogram = found["histograms"][name]
        assert histogram["counts"] == np.histogram(values, histogram["edges"])[0].tolist()
        assert sum(histogram["counts"]) == values.size, name
    assert [one["index"] for one in found["transmitters"]] == list(range(SAMPLES))
    for at, one in enumerate(found["transmitters"]):
        assert [one["lat"], one["lon"]] == rows["transmitter"][at, :2].tolist()
        assert one["snr_db"] == pytest.approx(snr_db[at][rows["present"][at]].max())
        assert (one["gdop"], one["crlb_m"]) == pytest.approx((rows["gdop"][at], rows["crlb_m"][at]))


def test_a_growing_dataset_shows_what_is_there_and_no_sample_beyond_its_end(api, made, tmp_path):
    place = tmp_path / "growing"
    id = bring(api, place, state="writing", items=0)

    nothing = api.get(f"/api/datasets/{id}/statistics")
    assert (nothing.status, "still being written" in nothing.json["detail"]) == (409, True)
    assert api.get(f"/api/datasets/{id}/samples/0").status == 409

    shutil.copytree(made["fixed"], place)
    whole = json.loads((place / "manifest.json").read_text())
    for shards in (0, 1, 2):
        kept = whole["shards"][:shards]
        items = sum(one["items"] for one in kept)
        totals = kept[-1]["totals"] if kept else {}
        part = {name: value for name, value in whole.items() if name not in ("counts", "report")}
        part |= {"shards": kept, "items": items, "complete": False, "totals": totals}
        (place / "manifest.json").write_text(json.dumps(part))
        found = figures(api, id)
        assert (found["samples"], found["complete"]) == (items, False)
        assert sum(found["histograms"]["gdop"]["counts"]) == len(found["transmitters"]) == items
        assert found["attempted"] == (totals["attempted"] if kept else None)
        beyond = api.get(f"/api/datasets/{id}/samples/{items}")
        assert (beyond.status, f"there is no sample {items}" in beyond.json["detail"]) == (404, True)
        assert api.get(f"/api/datasets/{id}/samples/{max(0, items - 1)}").status == (200 if items else 404)


def test_figures_are_kept_until_the_files_change(api, made, tmp_path, monkeypatch):
    calls = []
    survey = summary.survey
    monkeypatch.setattr(summary, "survey", lambda *args, **more: calls.append(1) or survey(*args, **more))
    place = tmp_path / "copy"
    shutil.copytree(made["fixed"], place)
    id = bring(api, place)
    answers: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(figures(api, id))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(one == answers[0] == figures(api, id) for one in answers)
    assert len(calls) == 1
    shutil.copyfile(made["random"] / "manifest.json", place / "new.json")
    shutil.rmtree(place / "shards")
    shutil.copytree(made["random"] / "shards", place / "shards")
    (place / "new.json").replace(place / "manifest.json")
    assert figures(api, id)["receivers"] == []
    assert len(calls) == 2


@pytest.mark.parametrize("change", ["none", "came", "grew", "changed", "replaced"])
def test_figures_are_made_again_for_a_file_that_came_grew_changed_or_was_replaced(tmp_path, change):
    place, file, content = tmp_path / "images", tmp_path / "images" / "a.png", picture()
    place.mkdir()
    file.write_bytes(content)
    os.utime(file, ns=(0, 10**18))
    known = functions.statistics(str(place), "images")["stamp"]

    written = {"came": place / "b.png", "replaced": tmp_path / "new"}.get(change, file)
    written.write_bytes(content + b"x" * (change == "grew"))
    os.utime(written, ns=(0, 10**18 + (change == "changed")))
    if change == "replaced":
        written.replace(file)

    assert (functions.statistics(str(place), "images", known)["figures"] is None) == (change == "none")


# One sample


@pytest.mark.parametrize("name", ["fixed", "random", "iq"])
def test_a_sample_is_shown_with_the_spectra_of_those_that_heard(api, made, name):
    data = Dataset(made[name])
    index = len(data) - 1
    row = {key: tensor[0] for key, tensor in data.rows(index, index + 1).items()}

    answer = api.get(f"/api/datasets/{bring(api, made[name])}/samples/{index}")

    found = answer.json
    assert answer.status == 200, found
    assert (found["index"], found["attempt"]) == (index, int(row["index"]))
    assert list(found["transmitter"].values()) == row["transmitter"].tolist()
    assert found["note"] is None
    assert len(found["receivers"]) == int(row["valid"].sum())
    assert sum(one["heard"] for one in found["receivers"]) == int(row["present"].sum())
    for at, one in enumerate(found["receivers"]):
        assert [one["lat"], one["lon"], one["alt_m"]] == row["receivers"][at].tolist()
        assert one["heard"] == (one["spectrum"] is not None) == (one["snr_db"] is not None)
        assert one["link_snr_db"] == pytest.approx(float(column(data, "truth", "link_snr_db")[index, at]))
        if one["heard"]:
            check_spectrum(one["spectrum"], one["snr_db"])


def check_spectrum(spectrum: dict[str, Any], snr_db: float) -> None:
    """In dBm/Hz around the noise, and with the power in the channel that the measured SNR says."""
    frequency, power = np.array(spectrum["frequency_hz"]), 10 ** (np.array(spectrum["power_db"]) / 10)
    assert len(frequency) == len(power) <= 512
    assert (np.diff(frequency) > 0).all()
    noise = 10 ** (spectrum["noise_db"] / 10)
    outside = power[np.abs(frequency) > 15_000]
    assert 10 * np.log10(outside.mean() / noise) == pytest.approx(0, abs=0.6)
    in_channel = power[np.abs(frequency) <= 6_250].mean() / noise - 1
    assert 10 * np.log10(in_channel) == pytest.approx(snr_db, abs=3)  # the mean over chunks is of decibels


# Images and sequences


def test_images_are_counted_by_size_again_when_one_is_added(api, made):
    sizes = [(6, 4), (9, 7), (6, 4)]
    parts: list[Part] = [("images", f"{n}.png", picture(*size)) for n, size in enumerate(sizes)]
    parts.append(("images", "3.tif", picture(5, 3, "TIFF")))
    parts.append(("images", "4.jpg", picture(300, 200, "JPEG")))
    parts.append(("images", "5.bmp", picture(11, 12, "BMP")))
    parts.append(("images", "6.png", picture()[:20]))  # cut: begins like one, which is all that is asked of it
    parts += [("masks", name, content) for _, name, content in parts]
    answer = upload(api, [*NAMED, *parts])
    assert answer.status == 201, answer.json

    found = figures(api, answer.json["id"])

    sizes_found = {(one["width"], one["height"]): one["count"] for one in found.pop("sizes")}
    assert found == {"kind": "images", "items": 7, "masks": 7, "unreadable": 1}
    assert sizes_found == {(6, 4): 2, (9, 7): 1, (5, 3): 1, (300, 200): 1, (11, 12): 1}
    assert [figures(api, bring(api, made["fixed"]))["kind"], figures(api, answer.json["id"])["kind"]] == [
        "rf",
        "images",
    ]
    images = api.settings.data / "datasets" / answer.json["id"] / "images"
    (images / "7.png").write_bytes(picture(6, 4))
    assert figures(api, answer.json["id"])["sizes"][0] == {"width": 6, "height": 4, "count": 3}
    sample = api.get(f"/api/datasets/{answer.json['id']}/samples/0")
    assert (sample.status, "images" in sample.json["detail"]) == (409, True)


def test_sequences_are_counted_by_class_and_length(api):
    parts: list[Part] = [("sequences", f"{n}.npy", array(5 + n, 3)) for n in range(4)]
    parts.append(("labels", "labels.csv", b"file,label\n0.npy,walk\n1.npy,walk\n2.npy,run\n3.npy,run\n"))
    answer = upload(api, [*SEQUENCES, *parts])
    assert answer.status == 201, answer.json

    found = figures(api, answer.json["id"])

    frames = found.pop("histograms")["frames"]
    assert found == {
        "kind": "sequences", "items": 4, "features": 3, "classes": {"run": 2, "walk": 2}, "unlabelled": 0,
    }  # fmt: skip
    assert sum(frames["counts"]) == 4
    assert (frames["edges"][0], frames["edges"][-1], frames["unit"]) == (5, 8, "frames")
    assert api.get(f"/api/datasets/{answer.json['id']}/samples/0").status == 409
