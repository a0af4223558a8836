import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_dataset import write_dataset

from brim.engine.storage import Dataset, ShardWriter
from brim.errors import DatasetError, ShardCorrupt, StorageError
from brim.report.page import metres, number, percent, plain, size
from brim.report.svg import ChartAxis, MapFrame
from brim.rf.config import BUILTIN_STATIONS, CHANNEL_HZ, GenerateConfig, Station
from brim.rf.datasets.page import first_record, welch, write_report
from brim.rf.physics.link import noise_dbm

CONFIG = GenerateConfig(duration_s=0.2, max_gdop=10.0)
SECTIONS = ("map", "snr", "bound", "gdop", "arrival", "spectrum", "channel", "rejections", "throughput")
VOID = {"meta"}


class Page(HTMLParser):
    """Checks that tags nest, and collects sections, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.values, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        self.values += [(tag, name, value) for name, value in attributes]

    def handle_startendtag(self, tag, attributes):
        self.values += [(tag, name, value) for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "alpine <net>"
    return path, write_dataset(path, CONFIG)


@pytest.fixture(scope="module")
def page(dataset):
    path, _ = dataset
    file = path.parent / "page.html"
    write_report(path, file)
    return file.read_text(encoding="utf-8")


def test_every_section_is_there(page):
    assert Page(page).ids == [*SECTIONS, "configuration"]


def test_page_loads_nothing(page):
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page
    tags = {tag for tag, _, _ in Page(page).values}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "use"}
    assert not [name for _, name, _ in Page(page).values if name in ("src", "href", "xlink:href")]


def test_names_are_escaped_and_shown(page):
    found = Page(page)
    text = " ".join(found.words)
    assert "alpine <net>" in text
    assert "<net>" not in page
    for station in BUILTIN_STATIONS:
        assert station.name in text


def test_hostile_station_names_stay_text(tmp_path):
    bad = '"><script>alert(1)</script>'
    stations = (Station(bad, 45.03, 7.27, 600.0), *BUILTIN_STATIONS[1:])
    write_dataset(tmp_path / "hostile", GenerateConfig(duration_s=0.2, stations=stations), attempts=3)
    write_report(tmp_path / "hostile", tmp_path / "page.html")
    found = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert bad in found.words
    assert "script" not in {tag for tag, _, _ in found.values}


def test_page_follows_the_readers_theme_and_screen(page):
    assert "prefers-color-scheme:dark" in page
    assert 'content="width=device-width, initial-scale=1"' in page
    assert all(value for tag, name, value in Page(page).values if (tag, name) == ("svg", "aria-label"))


def test_coordinates_are_numbers(page):
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL), re.IGNORECASE)


@pytest.mark.parametrize(
    "config",
    [
        GenerateConfig(duration_s=0.2, waveform="cw"),
        GenerateConfig(duration_s=0.2, use_random_receivers=True),
        GenerateConfig(duration_s=0.2, dataset_type="iq_raw", waveform="fsk"),
    ],
    ids=["cw", "random", "iq_raw"],
)
def test_other_configurations_have_every_section(tmp_path, config):
    write_dataset(tmp_path / "data", config, attempts=3)
    write_report(tmp_path / "data", tmp_path / "page.html")
    ids = Page((tmp_path / "page.html").read_text(encoding="utf-8")).ids
    assert ids == [*SECTIONS, "configuration"]


def test_stopped_dataset_says_so(tmp_path):
    write_dataset(tmp_path / "data", CONFIG, attempts=3, finish=False)
    summary = write_report(tmp_path / "data", tmp_path / "page.html")
    text = " ".join(Page((tmp_path / "page.html").read_text(encoding="utf-8")).words)
    assert not summary.complete
    assert "stopped before the end" in text
    assert "Throughput was not recorded" in text


def test_dataset_without_samples_has_a_page(tmp_path):
    with ShardWriter(tmp_path / "empty", {"kind": "rf"}, items_per_shard=4):
        pass
    write_report(tmp_path / "empty", tmp_path / "page.html")
    found = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert found.ids == ["samples", "rejections", "throughput", "configuration"]


def test_manifest_without_optional_keys_has_a_page(tmp_path, dataset):
    _, rows = dataset
    with ShardWriter(tmp_path / "bare", {"kind": "rf"}, items_per_shard=4) as writer:
        writer.append(rows, {})
    manifest = tmp_path / "bare" / "manifest.json"
    assert "config" not in json.loads(manifest.read_text(encoding="utf-8"))
    write_report(tmp_path / "bare", tmp_path / "page.html")
    assert "Attempts were not counted" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_altered_shard_gives_no_page(tmp_path):
    write_dataset(tmp_path / "data", CONFIG, attempts=3)
    shard = tmp_path / "data" / "shards" / "000000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ShardCorrupt):
        write_report(tmp_path / "data", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_missing_dataset_gives_no_page(tmp_path):
    with pytest.raises(DatasetError):
        write_report(tmp_path / "nothing", tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["missing/page.html", "taken", "file/page.html"])
def test_unwritable_page_is_a_storage_error_and_leaves_nothing(tmp_path, dataset, place):
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_report(dataset[0], tmp_path / place)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "taken"]


def test_page_replaces_an_older_one_whole(tmp_path, dataset):
    (tmp_path / "page.html").write_text("old")
    write_report(dataset[0], tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert len(list(tmp_path.iterdir())) == 1


def test_record_made_again_is_the_one_that_was_stored(tmp_path):
    config = GenerateConfig(duration_s=0.2, dataset_type="iq_raw", seed=5)
    rows = write_dataset(tmp_path / "iq", config, attempts=2)
    write_dataset(tmp_path / "features", GenerateConfig(duration_s=0.2, seed=5), attempts=2)
    made, index, receiver = first_record(Dataset(tmp_path / "features"))
    stored, *same = first_record(Dataset(tmp_path / "iq"))
    assert same == [index, receiver]
    np.testing.assert_array_equal(made, stored)
    np.testing.assert_array_equal(made, rows["iq"][0, receiver].numpy())


def test_spectrum_holds_the_power_of_the_record(dataset):
    iq, _, _ = first_record(Dataset(dataset[0]))
    frequency, density = welch(iq, 1024)
    step = frequency[1] - frequency[0]
    assert density.sum() * step == pytest.approx(float((np.abs(iq) ** 2).mean()), rel=0.05)
    outside = density[np.abs(frequency) > 20e3].mean()
    assert 10 * math.log10(outside * CHANNEL_HZ) == pytest.approx(noise_dbm(CONFIG), abs=0.2)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_linear_ticks_are_round_and_inside(low, wide):
    axis = ChartAxis.linear(low, low + wide)
    assert 1 <= len(axis.ticks) <= 6
    slack = 1e-6 * (wide + abs(low))
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in axis.ticks)


@given(st.floats(1e-3, 1e6), st.floats(1.5, 1e6))
def test_logarithmic_ticks_are_one_two_or_five(low, ratio):
    axis = ChartAxis.logarithmic(low, low * ratio)
    assert {f"{tick:.6e}"[0] for tick in axis.ticks} <= {"1", "2", "5"}
    assert axis.share(low) == 0
    assert axis.share(low * ratio) == pytest.approx(1)


def test_axis_of_equal_values_has_a_width():
    assert ChartAxis.fitting(np.array([3.0, 3.0])).high > 3
    assert ChartAxis.logarithmic(5.0, 5.0).high > 5


def test_map_has_equal_scales_in_metres():
    frame = MapFrame.around(np.array([59.0, 61.0]), np.array([10.0, 12.0]))
    assert frame.per_deg_lon == pytest.approx(frame.per_deg_lat * 0.5)


def test_map_of_one_point_is_drawn():
    x, y = MapFrame.around(np.array([45.0]), np.array([7.0])).at(45.0, 7.0)
    assert np.isfinite([x, y]).all()


def test_numbers_read_well():
    assert [number(v) for v in (None, 0, 7, 1234567, 0.12345, -3.456, 999.9)] == [
        "–", "0", "7", "1\u202f234\u202f567", "0.123", "−3.46", "1\u202f000",
    ]  # fmt: skip
    assert (metres(441.7), metres(3216.0)) == ("442\u00a0m", "3.22\u00a0km")
    assert (percent(0.9834), size(123_456_789)) == ("98.3\u00a0%", "118\u00a0MiB")
    assert [plain(v) for v in (True, 1e-6, [300.0, 3000.0], "nbfm")] == ["yes", "1e-06", "300, 3\u202f000", "nbfm"]
