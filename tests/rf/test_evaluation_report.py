import re

import pytest
from gaussian_rows import EXACT, PRODUCTION, gaussian_rows
from test_report import Page

from brim.errors import StorageError
from brim.report.page import metres, number, percent
from brim.rf.location.evaluate import LEVELS, baselines, evaluate
from brim.rf.location.model import Estimate
from brim.rf.location.page import write_evaluation
from brim.rf.location.solver import target

SECTIONS = ["baselines", "map", "coverage", "bound", "cumulative", "snr", "receivers"]


def answers(config, attempts):
    rows = gaussian_rows(config, attempts, level=True)
    others = baselines(rows, config, EXACT)
    return rows, others, evaluate(others["arrival_strength"], rows, config, others)


@pytest.fixture(scope="module")
def found():
    return answers(PRODUCTION, 120)


@pytest.fixture(scope="module")
def page(found, tmp_path_factory):
    rows, others, metrics = found
    file = tmp_path_factory.mktemp("page") / "evaluation.html"
    write_evaluation("runs/one", "held <out>", metrics, rows, others["arrival_strength"], others, file)
    return file.read_text(encoding="utf-8")


def write(tmp_path, metrics, rows, estimate, others, run="run"):
    write_evaluation(run, "data", metrics, rows, estimate, others, tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def first(estimate, num):
    return Estimate(*(part[:num] for part in estimate))


def words(page):
    return " ".join(Page(page).words)


def test_headline_shows_the_metrics(page, found):
    metrics = found[2]
    tiles = re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd>", page)
    expected = [str(metrics["samples"])]
    expected += [metres(metrics[key]) for key in ("median_error_m", "mean_error_m", "p95_error_m")]
    expected += [number(metrics["crlb_ratio"]), *(percent(metrics["coverage"][level]) for level in LEVELS)]
    assert [value for _, value in tiles] == expected
    assert f"{number(metrics['crlb_ratio_trimmed'])} without the worst" in page
    assert f"{number(metrics['crlb_ratio_median'])} of the medians" in page


def test_table_shows_model_and_baselines(page, found):
    lines = re.findall(r"<tr><td>(.*?)</tr>", page)
    cells = [re.split(r"</td>(?:<td>)?", line)[:-1] for line in lines]
    listed = [found[2], *found[2]["baselines"].values()]
    assert [row[0] for row in cells][:4] == [
        "model",
        "power-weighted centroid",
        "strength",
        "arrival times + strength",
    ]
    for row, metrics in zip(cells, listed, strict=True):
        assert row[1:4] == [metres(metrics[key]) for key in ("median_error_m", "mean_error_m", "p95_error_m")]
        assert row[4] == number(metrics["crlb_ratio"])
        assert row[7:] == [percent(metrics["coverage"][level]) for level in LEVELS]


def test_share_below_the_bound_is_counted(page, found):
    rows, others, _ = found
    estimate = others["arrival_strength"]
    error = (estimate.position_en - target(rows, estimate.origin, PRODUCTION)).norm(dim=-1)
    share = float((error <= rows["crlb_m"]).double().mean())
    assert f"{percent(share)} of the errors are smaller than their bound" in words(page)


def test_hostile_names_stay_text(tmp_path, found):
    rows, others, metrics = found
    bad = '"><script>alert(1)</script>'
    listed = metrics | {"baselines": {bad: metrics["baselines"]["strength"]}}
    page = write(tmp_path, listed, rows, others["arrival_strength"], {bad: others["strength"]}, bad)
    got = Page(page)
    assert "script" not in {tag for tag, _, _ in got.values}
    assert bad in got.words
    assert f"LocatorEvaluation of {bad}" in got.words


def test_unwritable_file_is_a_storage_error_and_leaves_nothing(tmp_path, found):
    rows, others, metrics = found
    (tmp_path / "page.html").mkdir()
    with pytest.raises(StorageError, match="cannot write"):
        write(tmp_path, metrics, rows, others["arrival_strength"], {})
    with pytest.raises(StorageError, match="another file for report"):
        write(tmp_path / "missing", metrics, rows, others["arrival_strength"], {})
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
