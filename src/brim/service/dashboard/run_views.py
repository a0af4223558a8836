"""What the newest evaluation of a run found: a locator's errors on a map, or sequences in a plane."""

from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import charts, words
from brim.service.dashboard.client import Api, Json, Refused, part
from brim.service.dashboard.layout import card, empty, figure, show_refusal
from brim.service.dashboard.maps import Map, Scale, metres
from brim.service.dashboard.tables import draw_table

MAPPED = 400  # errors with their ellipses: more would hide one another
_SCORES: Final = {
    "accuracy": "accuracy",
    "ari": "adjusted Rand index",
    "nmi": "mutual information",
    "items": "sequences",
}


async def draw_errors(api: Api, place: str) -> None:
    """Where a locator puts transmitters, and how far that is from what is possible."""
    with ui.column().classes("brim-stack") as inside:
        pass
    found = await _left(api, f"{place}/errors", inside, "How well does it locate?")
    if found is None:
        return
    with inside:
        with card("Errors"):
            _draw_error_figures(found)
        with card("Where it is wrong"):
            _draw_error_map(found, api.settings.tile_url)
        with card("Error against bound"):
            pairs = [(one["bound_m"], one["error_m"]) for one in found["points"] if one["bound_m"] and one["error_m"]]
            if pairs:
                top = max(max(pair) for pair in pairs)
                options = charts.scatter(
                    {"samples": pairs}, x_name="bound, m", y_name="error, m", diagonal=top, is_log=True
                )
                charts.draw(options, "Error against bound, both logarithmic").classes("brim-chart-high")
            ui.label(
                "On the dashed line the error is as large as its Cramér-Rao bound; single errors lie on both sides."
            ).classes("brim-muted")


async def draw_embedding(api: Api, place: str) -> None:
    """What a network makes of sequences, along the two axes that tell most."""
    with ui.column().classes("brim-stack") as inside:
        pass
    found = await _left(api, f"{place}/embedding", inside, "How well does it tell sequences apart?")
    if found is None:
        return
    groups: dict[str, list[tuple[float, float]]] = {}
    for one in found["points"]:
        groups.setdefault(one["label"], []).append((one["x"], one["y"]))
    across, up = (
        f"axis {axis + 1}, {words.share(share)} of the variance" for axis, share in enumerate(found["explained"])
    )
    with inside, card("Embedding"):
        with ui.row().classes("brim-figures"):
            for name, value in found["scores"].items():
                if value is not None and not isinstance(value, dict | list):
                    figure(_SCORES.get(name, name.replace("_", " ")), _score(name, value))
        options = charts.scatter(dict(sorted(groups.items())), x_name=across, y_name=up)
        charts.draw(options, "Sequences in the plane, by label").classes("brim-chart-high")
        wrong = sum(one["label"] != one["predicted"] for one in found["points"])
        ui.link(f"From the newest evaluation: {wrong} of {len(found['points'])} are told apart wrongly", _job(found))


async def _left(api: Api, place: str, inside: ui.column, question: str) -> Json | None:
    """What an evaluation left; where there is none, how to get it."""
    try:
        found: Json = await api.get(place)
        return found
    except Refused as failure:
        with inside, card():
            if failure.status != 404:
                show_refusal(failure)
            else:
                is_rf = place.endswith("/errors")
                id = place.split("/")[3]
                empty(
                    question,
                    "Nobody evaluated this run yet, or not with what this page shows.",
                    action="Evaluate it on a dataset",
                    target=f"/jobs/new?kind={'rf' if is_rf else 'sequence'}.evaluate&run_id={id}",
                )
        return None


def _draw_error_figures(found: Json) -> None:
    metrics = found["metrics"]
    with ui.row().classes("brim-figures"):
        figure("median error", metres(metrics["median_error_m"]))
        figure("mean error", metres(metrics["mean_error_m"]))
        figure("95 % are below", metres(metrics["p95_error_m"]))
        figure("times the bound", words.number(metrics["crlb_ratio"]))
        for level, share in metrics["coverage"].items():
            figure(f"inside {level} % ellipses", f"{100 * share:.1f} %")
    rows = [("this run", *_row(metrics))] + [
        (name.replace("_", " and "), *_row(one)) for name, one in metrics.get("baselines", {}).items()
    ]
    names = ("Method", "Median, m", "Mean, m", "95 %, m", "× bound")
    draw_table("This run beside simpler methods", names, rows)
    ui.link(f"From the newest evaluation, {words.number(found['samples'])} samples", _job(found))


def _row(metrics: Json) -> tuple[Any, ...]:
    names = ("median_error_m", "mean_error_m", "p95_error_m", "crlb_ratio")
    return tuple(round(metrics[name], 2) if metrics.get(name) is not None else None for name in names)


def _draw_error_map(found: Json, tile_url: str) -> None:
    points = found["points"]
    taken = points[:: max(1, -(-len(points) // MAPPED))]
    scale = Scale([one["error_m"] for one in taken])
    errors = [
        {
            "truth": one["truth"],
            "estimate": one["estimate"],
            "axes": _axes(one["ellipse"]),
            "azimuth": one["ellipse"]["azimuth_deg"],
            "colour": scale.colour(one["error_m"]),
            "words": f"Error {metres(one['error_m'])}, bound {metres(one['bound_m'])}",
        }
        for one in taken
    ]
    Map("Map of errors with their ellipses", errors=errors, tile_url=tile_url)
    with ui.row(align_items="center").classes("brim-tools"):
        scale.draw("error")
        ui.space()
        ui.label(
            f"{words.number(len(taken))} of {words.number(found['samples'])}: point, line to the estimate, "
            f"{words.share(found['level'])} ellipse"
        ).classes("brim-muted")


def _axes(ellipse: Json) -> list[float] | None:
    axes = [ellipse["semi_major_m"], ellipse["semi_minor_m"]]
    return None if None in axes else axes


def _score(name: str, value: Any) -> str:
    return words.share(value) if "accuracy" in name else words.number(value)


def _job(found: Json) -> str:
    return f"/jobs/{part(found['job_id'])}"
