"""The page of `brim demo`: what each stage came to in figures and pictures, and links to the pages about the parts."""

from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from brim.report.page import card, document, metres, number, percent, table, tiles, write_page

_MOST_PICTURES = 4


def write_overview(out: Path, found: dict[str, Any], run: str) -> None:
    """Write OUT/report.html from what the stages found, by name; links are relative: the folder may move."""
    head = "<header><h1>brim demo</h1><p>Every workload once, small, on this machine.</p></header>"
    cards = [_radio(found, run), _segmentation(out, found), _tuning(found), _sequences(found), _service(found)]
    body = f'{head}\n{_headline(found)}\n<div class="cards">\n{"".join(cards)}\n</div>'
    write_page(out / "report.html", document("brim demo", body))


def _headline(found: dict[str, Any]) -> str:
    made, errors, segmented = found["generate"], found["evaluate"], found["segment"]
    scored = found["sequences"]["evaluate"]
    share = made["accepted"] / max(1, made["attempted"])
    return tiles(
        [
            ("radio samples", number(made["accepted"]), f"{percent(share)} of those tried"),
            ("median error", metres(errors["median_error_m"]), f"{number(errors['crlb_ratio'])} times the bound"),
            ("Dice", number(segmented["train"]["dice"]), "on cells held out"),
            ("polygons", number(segmented["predict"]["polygons"]), "in images it had not seen"),
            ("accuracy", percent(scored["accuracy"]), f"on {number(scored['items'])} sequences held out"),
        ]
    )


def _radio(found: dict[str, Any], run: str) -> str:
    pages = (("dataset.html", "the dataset"), ("evaluation.html", "the locator on samples it had not seen"))
    note = f"A transmitter is located by what receivers hear of it; the network is in {run}."
    return card("radio", "Radio: generate, train, evaluate", note, _links(pages))


def _segmentation(out: Path, found: dict[str, Any]) -> str:
    pictures = sorted((out / "overlays").glob("*.png"))[:_MOST_PICTURES]
    images = "".join(
        f'<img src="overlays/{quote(file.name)}" alt="cells with their outlines" width="160"> ' for file in pictures
    )
    iou = percent(found["segment"]["train"]["iou"])
    note = f"Outlines that the network drew in new images; IoU {iou} on those held out. GeoJSON is in polygons."
    return card("segment", "Segmentation: images to polygons", note, images)


def _tuning(found: dict[str, Any]) -> str:
    rows = [
        [name, one["optimal_batch_size"], f"{one['expected_throughput']:.4g}", one["max_safe_batch_size"]]
        for name, one in found["tune"].items()
        if isinstance(one, dict)
    ]
    note = f"Measured on this device for images of {_size(found)} pixels, and kept in batch_sizes.json."
    body = table(rows, ["network", "fastest batch", "images/s", "largest safe batch"])
    return card("tune", "Tuning: the fastest safe batch size", note, body)


def _size(found: dict[str, Any]) -> str:
    sides = {one["image_size"] for one in found["tune"].values() if isinstance(one, dict)}
    return ", ".join(f"{side} × {side}" for side in sorted(sides))


def _sequences(found: dict[str, Any]) -> str:
    packed, trained = found["sequences"]["pack"], found["sequences"]["train"]
    rows = [
        ["sequences", packed["items"]],
        ["frames", packed["frames"]],
        ["classes", len(packed["classes"])],
        ["padding", percent(trained["padding_share"])],
        ["samples/s in training", number(trained["samples_per_s"])],
    ]
    return card(
        "sequences", "Sequences: pack, train, evaluate", "A CNN→LSTM on sequences of many lengths.", table(rows)
    )


def _service(found: dict[str, Any]) -> str:
    command = f"<pre>{escape(found['dashboard']['command'])}</pre>"
    note = "Lists these datasets, runs and models in a browser, and makes more of them as durable jobs."
    return card("service", "The same as a service", note, command)


def _links(pages: tuple[tuple[str, str], ...]) -> str:
    items = "".join(f'<li><a href="{escape(file)}">{escape(words)}</a></li>' for file, words in pages)
    return f"<ul>{items}</ul>"
