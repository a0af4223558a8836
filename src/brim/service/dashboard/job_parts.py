"""What pages show of a job: its status in a colour and a word, how far it has come, and requests to copy."""

import json
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import words
from brim.service.dashboard.client import JsonValue
from brim.service.settings import Settings

STATUSES: Final = ("pending", "queued", "running", "paused", "completed", "failed", "cancelled")
WAITING: Final = ("pending", "queued")
UNFINISHED: Final = (*WAITING, "running")
TITLES: Final = {  # as the API has them, which a test compares: a list need not wait until the API knows all kinds
    "rf.generate": "Generate radio samples",
    "rf.train": "Train a locator",
    "rf.evaluate": "Evaluate a locator",
    "segment.tune": "Tune batch sizes",
    "segment.predict": "Segment images",
    "segment.train": "Train segmentation",
    "sequence.train": "Train on sequences",
    "sequence.evaluate": "Evaluate on sequences",
}


class StatusLabel:
    """A job's status: a coloured point and the word."""

    def __init__(self, status: str = "") -> None:
        self._shown = ui.label().classes("brim-status")
        self._status = ""
        self.show(status)

    def show(self, status: str) -> None:
        if status != self._status:
            self._shown.classes(remove=f"brim-status-{self._status}", add=f"brim-status-{status}")
            self._shown.set_text(status)
            self._status = status


class ProgressBar:
    """A bar with what is known beside it: count, rate, time left, and the job's own words."""

    def __init__(self) -> None:
        self._bar = ui.linear_progress(0, show_value=False, size="8px").props('rounded aria-label="Progress"')
        self._text = ui.label().classes("brim-muted brim-figures-text")

    def show(self, job: JsonValue) -> None:
        """How far this job is."""
        percent = job["progress"]["percent"]
        is_running = job["status"] == "running"
        self._bar.props["indeterminate"] = is_running and percent is None
        self._bar.set_value((100.0 if job["status"] == "completed" else percent or 0) / 100)
        self._text.set_text(progress_text(job))


def progress_text(job: JsonValue) -> str:
    """The progress of a job in a line."""
    progress, parts = job["progress"], list[str]()
    if job["status"] == "completed":
        return f"{words.number(progress['total'])} done" if progress["total"] else ""
    if progress["total"]:
        parts.append(f"{words.number(progress['current'])} of {words.number(progress['total'])}")
    elif progress["current"]:
        parts.append(words.number(progress["current"]))
    if job["status"] == "running":
        if progress["rate"]:
            parts.append(words.rate(progress["rate"]))
        if progress["eta_s"] is not None:
            parts.append(f"{words.seconds(progress['eta_s'])} left")
    if progress["message"]:
        parts.append(progress["message"])
    return " · ".join(parts)


def copy_buttons(settings: Settings, body: Any) -> None:
    """Buttons that copy a request; body is the JSON, or a function that makes it when it is asked for."""

    def copy(make: Any) -> None:
        ui.clipboard.write(make(settings, body() if callable(body) else body))
        ui.notify("Copied.", type="positive", position="bottom")

    with ui.row().classes("q-gutter-sm"):
        ui.button("Copy as curl", icon="content_copy", on_click=lambda: copy(as_curl)).props("outline dense no-caps")
        ui.button("Copy as command", icon="terminal", on_click=lambda: copy(as_command)).props("outline dense no-caps")


def as_curl(settings: Settings, body: JsonValue) -> str:
    """The request as a command of curl; the token stays in its file."""
    return (
        f"curl -H \"Authorization: Bearer $(cat DATA/token)\" -H 'Content-Type: application/json' \\\n"
        f"  -d {_quoted(json.dumps(body, ensure_ascii=False))} \\\n  {settings.url}/api/training/jobs"
    )


def as_command(settings: Settings, body: JsonValue) -> str:
    """The request as a command of brim's own."""
    text = json.dumps(body, ensure_ascii=False, indent=1)
    return f"brim jobs submit - --url {settings.url} --token-file DATA/token <<'JSON'\n{text}\nJSON"


def job_body(job: JsonValue) -> JsonValue:
    """What to send for the same job again."""
    return {"kind": job["kind"], "name": job["name"], "config": job["config"]}


def _quoted(text: str) -> str:
    escaped = text.replace("'", "'\\''")
    return f"'{escaped}'"
