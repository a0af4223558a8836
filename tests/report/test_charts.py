"""Charts as they are drawn: where values lie, which ticks an axis has, and that names stay text."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from brim.errors import ConfigError, StorageError
from brim.report.page import (
    card,
    count,
    document,
    legend,
    metres,
    number,
    percent,
    plain,
    size,
    table,
    tiles,
    write_page,
)
from brim.report.plot_file import check_plot
from brim.report.summary import Summarised, counted
from brim.report.svg import ChartAxis, MapFrame, Plot, drawing, stacked_bars

HOSTILE = '<script>alert("1")</script>&'
LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 66.0, 466.0, 12.0, 234.0, 280.0  # the drawing area of a plot


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?", text)]


def test_values_are_drawn_where_they_belong():
    """x from 0 to 4 and y from 1 to 100 by its logarithm, in 400 × 222 units with y upwards."""
    plot = Plot(ChartAxis.linear(0, 4), ChartAxis.logarithmic(1, 100), HEIGHT)
    plot.line(np.array([0.0, 1.0, 4.0]), np.array([1.0, 10.0, 100.0]), "a")

    points = numbers(re.search(r'points="([^"]*)"', plot.marks[0])[1])
    assert points == [LEFT, BOTTOM, LEFT + 100, (TOP + BOTTOM) / 2, RIGHT, TOP]


def test_what_lies_beyond_the_axes_lies_on_them():
    plot = Plot(ChartAxis.linear(0, 4), ChartAxis.linear(0, 10), HEIGHT)
    plot.dots(np.array([-9.0, 9.0]), np.array([99.0, -99.0]), "a")

    assert numbers(re.search(r' d="([^"]*)"', plot.marks[0])[1]) == [LEFT, TOP, 0, RIGHT, BOTTOM, 0]


def test_bars_of_a_histogram_are_as_high_as_their_counts():
    plot = Plot(ChartAxis.linear(0, 4), ChartAxis.linear(0, 10), HEIGHT)
    plot.bars(np.array([0.0, 2.0, 3.0, 4.0]), np.array([5, 0, 10]), "a")

    path = re.search(r' d="([^"]*)"', plot.marks[0])[1]
    middle = (TOP + BOTTOM) / 2
    assert [numbers(bar) for bar in path.split("z")[:-1]] == [
        [LEFT + 0.5, BOTTOM, middle, LEFT + 199.5, BOTTOM],
        [LEFT + 300.5, BOTTOM, TOP, RIGHT - 0.5, BOTTOM],
    ]


def test_a_histogram_counts_every_value_once():
    values = np.random.default_rng(0).normal(size=500)
    plot = Plot.histograms(ChartAxis.linear(-5, 5), values)
    heights = [numbers(bar)[2] for bar in re.search(r' d="([^"]*)"', plot.marks[0])[1].split("z")[:-1]]

    per_unit = (BOTTOM - TOP) / plot.y.high
    assert sum(BOTTOM - top for top in heights) == pytest.approx(500 * per_unit, rel=0.01)


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (ChartAxis.linear(0, 1), (0, 0.2, 0.4, 0.6, 0.8, 1)),
        (ChartAxis.linear(-30, 12), (-30, -20, -10, 0, 10)),
        (ChartAxis.linear(3, 3), (2.6, 2.8, 3, 3.2, 3.4)),
        (ChartAxis.logarithmic(3, 300), (5, 10, 20, 50, 100, 200)),
        (ChartAxis.logarithmic(0.5, 2e6), (1, 10, 100, 1e3, 1e4, 1e5, 1e6)),
        (ChartAxis.fitting(np.array([1.0, 20.0])), (5, 10, 15, 20)),
        (ChartAxis.fitting(np.array([1.0, 21.0])), (1, 2, 5, 10, 20)),
    ],
)
def test_an_axis_has_round_ticks_within_its_ends(axis: ChartAxis, ticks: tuple[float, ...]):
    assert axis.ticks == pytest.approx(ticks)


def test_bins_are_equally_wide_as_drawn():
    assert ChartAxis.logarithmic(1, 1e4).edges(4) == pytest.approx([1, 10, 100, 1e3, 1e4])
    assert ChartAxis.linear(-1, 3).edges(4).tolist() == [-1, 0, 1, 2, 3]


def test_a_spanning_axis_leaves_out_the_outermost_thousandths():
    axis = ChartAxis.spanning(np.array([1e-9, *range(2, 1001), 1e9, -5.0, np.nan]))

    assert (axis.low, axis.high) == (pytest.approx(2 / 1.15), pytest.approx(1000 * 1.15))


def test_stacked_bars_are_as_long_as_their_shares_of_the_limit():
    chart = stacked_bars([("first", [10.0, 30.0], "40"), ("second", [100.0, 30.0], "130")], ["a", "b"], 80.0, "title")

    bars = [numbers(mark)[:4] for mark in re.findall(r'<rect class="fill [^/]*/>', chart)]
    assert [(x, wide) for x, _, wide, _ in bars] == [(0, 60 - 1.5), (60, 180 - 1.5), (0, 480 - 1.5)]


def test_a_map_is_drawn_with_north_up_and_equal_scales():
    frame = MapFrame.around(np.array([59.0, 61.0]), np.array([10.0, 12.0]))
    (west, south), (east, north) = frame.at(59.0, 10.0), frame.at(61.0, 12.0)

    assert east > west
    assert north < south
    assert (east - west) / (south - north) == pytest.approx(0.5, rel=1e-3)  # cos 60°
    assert (east + west) / 2 == pytest.approx((LEFT + RIGHT) / 2)
    assert frame.holds([60.0, 70.0], [11.0, 11.0]).tolist() == [True, False]


def test_a_graticule_names_the_hemispheres():
    south_west = " ".join(MapFrame.around(np.array([-34.0, -33.0]), np.array([-71.0, -70.0])).graticule())
    north_east = " ".join(MapFrame.around(np.array([47.0, 48.0]), np.array([8.0, 9.0])).graticule())

    assert ("°S" in south_west, "°W" in south_west, "°N" in south_west, "°E" in south_west) == (
        True,
        True,
        False,
        False,
    )
    assert ("°S" in north_east, "°W" in north_east, "°N" in north_east, "°E" in north_east) == (
        False,
        False,
        True,
        True,
    )


def test_hostile_names_stay_text():
    plot = Plot(ChartAxis.linear(0, 1), ChartAxis.linear(0, 1))
    plot.band(0.2, 0.4, HOSTILE)
    plot.rule_x(0.5, HOSTILE)
    plot.rule_y(0.5, HOSTILE)
    sites = MapFrame.around(np.array([47.0]), np.array([8.0])).sites(np.array([47.0]), np.array([8.0]), [HOSTILE])
    parts = [
        plot.render(HOSTILE, HOSTILE, HOSTILE), drawing(10, sites, HOSTILE), tiles([(HOSTILE, HOSTILE, HOSTILE)]),
        stacked_bars([(HOSTILE, [1.0], HOSTILE)], ["a"], 1.0, HOSTILE), table([[HOSTILE, HOSTILE]], [HOSTILE, HOSTILE]),
        table([[HOSTILE, HOSTILE]]), legend([("a", HOSTILE)]), card("one", HOSTILE, HOSTILE),
    ]  # fmt: skip
    page = document(HOSTILE, "".join(parts))

    assert "<script" not in page
    assert '"1"' not in page
    assert page.count("&lt;script&gt;") >= 20


def test_objects_of_the_library_stay_text_in_a_notebook():
    class Named(Summarised):
        def _summary(self):
            return HOSTILE, {HOSTILE: HOSTILE}

    assert "<script" not in Named()._repr_html_()


def test_numbers_read_well():
    assert [number(value) for value in (None, 7, 1234567, 0.12345, -3.456, 999.9, math.nan)] == [
        "–", "7", "1\u202f234\u202f567", "0.123", "−3.46", "1\u202f000", "–",
    ]  # fmt: skip
    assert [metres(value) for value in (441.7, 999.4, 999.6)] == ["442\u00a0m", "999\u00a0m", "1\u00a0km"]
    assert (percent(0.9834), percent(None)) == ("98.3\u00a0%", "–")
    assert [count(value, "row") for value in (0, 1, 12_345)] == ["0 rows", "1 row", "12\u202f345 rows"]
    assert [counted(value, "row") for value in (0, 1, 2, 12_000)] == ["0 rows", "1 row", "2 rows", "12 000 rows"]
    assert [size(value) for value in (999, 1024, 1.5 * 2**30, 2**50)] == [
        "999\u00a0B", "1\u00a0KiB", "1.5\u00a0GiB", "1\u202f024\u00a0TiB",
    ]  # fmt: skip
    assert [plain(value) for value in (True, [1, -2.5], 1e-5, 2.0)] == ["yes", "1, −2.5", "1e-05", "2"]


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "page.html"
    write_page(file, "old")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match=r"report .*page\.html: cannot write, No space left") as caught:
        write_page(file, "new")
    assert caught.value.field == "report"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert file.read_text() == "old"


@pytest.mark.parametrize("name", ["plot.pdf", "plot", "folder.png"])
def test_a_plot_is_a_png_file(tmp_path: Path, name: str):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match="is not a PNG file"):
        check_plot(tmp_path / name)
    check_plot(tmp_path / "new" / "plot.PNG")
