import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_dataset import write_dataset

from brim.engine.storage import Dataset, ShardWriter
from brim.errors import StorageError
from brim.report.page import metres, number, percent, plain, size
from brim.report.svg import ChartAxis, MapFrame
from brim.rf.config import BUILTIN_STATIONS, CHANNEL_HZ, GenerateConfig, Station
from brim.rf.datasets.page import first_record, welch, write_report
from brim.rf.features import F
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


def test_page_has_every_section_and_numbers_and_loads_nothing(page):
    found = Page(page)
    assert found.ids == [*SECTIONS, "configuration"]
    assert not [word for word in ("http", "url(", "@import") if word in page]
    assert not {tag for tag, _, _ in found.values} & {"script", "link", "img", "iframe", "object", "image", "use"}
    assert not [name for _, name, _ in found.values if name in ("src", "href", "xlink:href")]
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL), re.IGNORECASE)


def test_headline_and_gates_are_those_of_the_rows(dataset, page):
    _, rows = dataset
    attempts, kept, records = 12, len(rows["index"]), int(rows["present"].sum())
    words = " | ".join(Page(page).words)
    measured = np.median(rows["features"][..., F["snr_db"], 0][rows["present"]])
    tiles = dict(re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert (tiles["samples"], tiles["IQ records"]) == (str(kept), str(records))
    assert tiles["accepted"] == percent(kept / attempts)
    assert float(tiles["median SNR"].split()[0]) == pytest.approx(float(measured), rel=0.02)
    assert tiles["median bound"] == metres(float(np.median(rows["crlb_m"])))
    assert f"Gates: {kept} of {attempts} attempts accepted" in words


def test_names_are_shown_and_stay_text(tmp_path):
    bad = '"><script>alert(1)</script>'
    stations = (Station(bad, 45.03, 7.27, 600.0), *BUILTIN_STATIONS[1:])
    write_dataset(tmp_path / "alpine <net>", GenerateConfig(duration_s=0.2, stations=stations), attempts=3)
    write_report(tmp_path / "alpine <net>", tmp_path / "page.html")
    found = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    text = " ".join(found.words)
    assert "script" not in {tag for tag, _, _ in found.values}
    assert all(name in text for name in (bad, "alpine <net>", *(station.name for station in stations)))


def test_dataset_without_samples_has_a_page(tmp_path):
    with ShardWriter(tmp_path / "empty", {"kind": "rf"}, items_per_shard=4):
        pass
    write_report(tmp_path / "empty", tmp_path / "page.html")
    found = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert found.ids == ["samples", "rejections", "throughput", "configuration"]


@pytest.mark.parametrize("place", ["missing/page.html", "taken"])
def test_unwritable_page_is_a_storage_error_and_leaves_nothing(tmp_path, dataset, place):
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_report(dataset[0], tmp_path / place)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "taken"]


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
def test_ticks_are_round_and_inside(low, wide):
    axis = ChartAxis.linear(low, low + wide)
    assert 1 <= len(axis.ticks) <= 6
    slack = 1e-6 * (wide + abs(low))
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in axis.ticks)
    logarithmic = ChartAxis.logarithmic(wide, wide * 50)
    assert {f"{tick:.6e}"[0] for tick in logarithmic.ticks} <= {"1", "2", "5"}
    assert (logarithmic.share(wide), logarithmic.share(wide * 50)) == pytest.approx((0, 1))


def test_map_has_equal_scales_in_metres():
    frame = MapFrame.around(np.array([59.0, 61.0]), np.array([10.0, 12.0]))
    assert frame.per_deg_lon == pytest.approx(frame.per_deg_lat * 0.5)


def test_numbers_read_well():
    assert [number(v) for v in (None, 0, 7, 1234567, 0.12345, -3.456, 999.9)] == [
        "–", "0", "7", "1\u202f234\u202f567", "0.123", "−3.46", "1\u202f000",
    ]  # fmt: skip
    assert (metres(441.7), metres(3216.0)) == ("442\u00a0m", "3.22\u00a0km")
    assert (percent(0.9834), size(123_456_789)) == ("98.3\u00a0%", "118\u00a0MiB")
    assert [plain(v) for v in (True, 1e-6, [300.0, 3000.0], "nbfm")] == ["yes", "1e-06", "300, 3\u202f000", "nbfm"]
