"""Runs: what was trained, newest first, and how well it went."""

from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import words
from brim.service.dashboard.client import Api, JsonValue
from brim.service.dashboard.layout import empty, every, frame
from brim.service.dashboard.listing import Listing, page_number

KINDS: Final = {
    "rf.train": "Locator",
    "segment.train": "Segmentation",
    "sequence.train": "Sequences",
}
_COLUMNS: Final = {
    "name": "Name",
    "kind": "Kind",
    "state": "State",
    "epoch": "Epochs",
    "best": "Best",
    "created": "Made",
}


def add(api: Api) -> None:
    @ui.page("/runs", response_timeout=30)
    async def runs(page: str = "1") -> None:
        with frame("Runs", "/runs"):
            wanted = {"page": page_number(page)}
            listed = Listing(api, "runs", wanted, columns=_COLUMNS, row=_row, nothing=_nothing)
        await listed.look()
        every(2.0, listed.look)


def best(summary: JsonValue | None) -> str:
    """The figure by which a run is judged, in words."""
    found: dict[str, Any] = summary or {}
    if found.get("dice") is not None:
        return f"Dice {found['dice']:.3f}"
    accuracy = (found.get("scores") or {}).get("accuracy")
    if accuracy is not None:
        return f"accuracy {words.share(accuracy)}"
    return words.NONE if found.get("best_val_loss") is None else f"loss {words.number(found['best_val_loss'])}"


def epochs(run: JsonValue) -> str:
    """Trained, of those wanted."""
    done = (run["summary"] or {}).get("epoch")
    wanted = (run["config"] or {}).get("epochs")
    if done is None:
        return words.NONE
    return f"{done} of {wanted}" if wanted else str(done)


def _row(run: JsonValue) -> JsonValue:
    kind = KINDS.get(run["kind"], run["kind"])
    return {
        "id": run["id"],
        "name": run["name"],
        "kind": kind,
        "state": run["state"],
        "epoch": epochs(run),
        "best": best(run["summary"]),
        "created": words.ago(run["created_at"]),
        "narrow": f"{kind} · {run['state']} · {best(run['summary'])}",
    }


def _nothing(is_filtered: bool) -> None:
    if is_filtered:
        empty("No runs here", "There are fewer pages.", action="Show the newest", target="/runs")
    else:
        empty(
            "No runs yet",
            "Training makes runs: locators on radio samples, segmentation on images, networks on sequences.",
            action="Train something",
            target="/jobs/new",
        )
