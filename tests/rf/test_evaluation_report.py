import re

import pytest
from gaussian_rows import EXACT, PRODUCTION, gaussian_rows
from test_report import Page

from brim.report.page import metres, number, percent
from brim.rf.location.evaluate import LEVELS, baselines, evaluate
from brim.rf.location.page import write_evaluation
from brim.rf.location.solver import target


@pytest.fixture(scope="module")
def found():
    rows = gaussian_rows(PRODUCTION, 120, level=True)
    others = baselines(rows, PRODUCTION, EXACT)
    return rows, others, evaluate(others["arrival_strength"], rows, PRODUCTION, others)


@pytest.fixture(scope="module")
def page(found, tmp_path_factory):
    rows, others, metrics = found
    file = tmp_path_factory.mktemp("page") / "evaluation.html"
    write_evaluation("runs/one", "held <out>", metrics, rows, others["arrival_strength"], others, file)
    return file.read_text(encoding="utf-8")


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
    assert f"{percent(share)} of the errors are smaller than their bound" in " ".join(Page(page).words)


def test_hostile_names_stay_text(tmp_path, found):
    rows, others, metrics = found
    bad = '"><script>alert(1)</script>'
    listed = metrics | {"baselines": {bad: metrics["baselines"]["strength"]}}
    file, strength = tmp_path / "page.html", {bad: others["strength"]}
    write_evaluation(bad, "data", listed, rows, others["arrival_strength"], strength, file)
    got = Page(file.read_text(encoding="utf-8"))
    assert "script" not in {tag for tag, _, _ in got.values}
    assert bad in got.words
    assert f"LocatorEvaluation of {bad}" in got.words
