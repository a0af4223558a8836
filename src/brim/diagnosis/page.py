"""An answer as a page: headline numbers, one step as a timeline, where its time goes, and what was tried."""

from html import escape
from typing import Any

from brim.diagnosis.answer import PASSES, Diagnosis
from brim.diagnosis.words import NAMES, amount, lines, shown_file
from brim.report.page import card, document, percent, table, tiles

WIDTH = 1080.0  # of the picture
COLOURS = {
    "data": "b", "copy": "c", "sync": "d", "launch": "e", "gc": "faint", "checkpoint": "s3", "evaluation": "s0",
    "communication": "soft", "compute": "a",
}  # fmt: skip
_SPANS = {"feed": "data", "between": "data", "after": "launch", **dict.fromkeys(PASSES, "compute")}


def page(answer: Diagnosis) -> str:
    """The whole page; it needs no other file."""
    head, *rest = lines(answer)
    note = "Time runs to the right: a typical step, and below it the mean by cause."
    cards = [
        card("timeline", "One step", note, _picture(answer)),
        card("words", "What it waits for", "", "".join(f"<p>{escape(line)}</p>" for line in rest)),
        _table("where", "Where", _where_rows(answer), ["cause", "share", "line", "function", ""]),
    ]
    if answer.tried:
        rows = [
            [t.change, amount(t.samples_per_s) if t.samples_per_s else "–", t.status, _loss(t.loss_changed), t.note]
            for t in answer.tried
        ]
        cards.append(_table("tried", "Tried", rows, ["change", "samples/s", "status", "loss", ""]))
    if answer.ranks:
        rows = [[r["rank"], f"{r['own_s'] * 1e3:.3g} ms", f"{r['step_s'] * 1e3:.3g} ms"] for r in answer.ranks]
        cards.append(_table("ranks", "Ranks", rows, ["rank", "own work", "step"]))
    header = f"<header><h1>{escape(head)}</h1><p>{escape(' '.join(answer.command))}</p></header>"
    body = "".join(f'<div style="margin-bottom:16px">{each}</div>' for each in cards)
    return document("What this training waits for", header + tiles(_tiles(answer)) + body)


def _table(kind: str, title: str, rows: list[list[Any]], head: list[str]) -> str:
    return card(kind, title, "", f'<div class="wide">{table(rows, head)}</div>')


def _tiles(answer: Diagnosis) -> list[tuple[str, str, str]]:
    roofs = answer.compute
    entries = [
        ("Speed", f"{amount(answer.samples_per_s or 0)}/s", "samples"),
        ("Ceiling", f"{amount(answer.ceiling_samples_per_s or 0)}/s", "the same step on one fixed batch"),
        ("Share", percent(answer.ceiling_share), "of the ceiling"),
        ("Limit", answer.limit or "–", NAMES.get(answer.limit or "", "")),
        ("Step", f"{(answer.step_s or 0) * 1e3:.3g}\u00a0ms", f"mean of {answer.steps}"),
        ("Arithmetic", percent(roofs["arithmetic"]), f"of the device; memory {percent(roofs['bandwidth'])}"),
    ]
    if answer.gpu is not None:
        entries.append(("GPU busy", percent(answer.gpu["busy"]), "while the script ran"))
    return entries


def _picture(answer: Diagnosis) -> str:
    """Two bars on one scale: the spans of a typical step, and the mean seconds by cause."""
    step_s = answer.step_s or 1.0
    spans = [(_SPANS.get(cause, cause), a, b) for cause, a, b in answer.timeline]
    scale = WIDTH / max(step_s, spans[-1][2] if spans else 0.0)
    marks = ['<text x="0" y="14">a step</text>']
    marks += [_bar(cause, a * scale, b * scale, 20) for cause, a, b in spans]
    marks.append('<text x="0" y="66">the mean</text>')
    x, y = 0.0, 112.0
    for cause, seconds in sorted(answer.waiting.items(), key=lambda entry: -entry[1]):
        marks.append(_bar(cause, x, x + seconds * scale, 72))
        x += seconds * scale
        if seconds >= 0.005 * step_s:
            text = f"{seconds / step_s:.0%} {NAMES[cause]}, {seconds * 1e3:.3g} ms"
            marks.append(_bar(cause, 0, 10, y, 10) + f'<text x="18" y="{y + 10:.0f}">{escape(text)}</text>')
            y += 20
    box = f"0 0 {WIDTH:.0f} {y + 4:.0f}"
    return f'<svg viewBox="{box}" role="img" aria-label="One step as a timeline">{"".join(marks)}</svg>'


def _bar(cause: str, left: float, right: float, top: float, height: float = 24) -> str:
    colour = COLOURS.get(cause, "grid")
    wide = max(0.5, right - left)
    return (
        f'<rect style="fill:var(--{colour})" x="{left:.2f}" y="{top:.0f}" width="{wide:.2f}" height="{height:.0f}">'
        f"<title>{escape(NAMES.get(cause, cause))}</title></rect>"
    )


def _where_rows(answer: Diagnosis) -> list[list[Any]]:
    return [
        [NAMES[p.cause], f"{p.share:.0%}", f"{shown_file(p.file)}:{p.line}", p.function, p.detail] for p in answer.where
    ]


def _loss(changed: bool | None) -> str:
    return {True: "changed", False: "equal within noise", None: "not compared"}[changed]
