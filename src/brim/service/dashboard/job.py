"""One job: its progress, log, config and results; and what other pages show of a job."""

import json
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from nicegui import ui

from brim.jobs.status import RESUMABLE, UNFINISHED
from brim.service.dashboard import charts, layout, words
from brim.service.dashboard.client import Api, JsonValue, Rejected, part
from brim.service.dashboard.dataset import ImageGrid
from brim.service.settings import Settings

JOBS: Final = "/api/training/jobs"
LOG_LINES = 1000  # kept in the page
LISTED_FILES = 200
NAMED = 8  # datasets of a job that are named
CHARTED = 600  # seconds
MAX_FIGURES = 16  # of a result that are shown large; the rest is shown as JSON
_ACTIONS: Final = {  # by name: icon, and the statuses in which it is offered
    "pause": ("pause", UNFINISHED),
    "cancel": ("stop", UNFINISHED | {"paused"}),
    "resume": ("play_arrow", RESUMABLE),
    "delete": ("delete", RESUMABLE | {"completed"}),
}


def add(api: Api) -> None:
    @ui.page("/jobs/{id}", response_timeout=30)
    async def job(id: str) -> None:
        place = f"{JOBS}/{part(id)}"
        job = await layout.load(api, place, "/jobs")
        if job is None:
            return
        with layout.frame(job["name"], "/jobs"):
            view = JobView(api, place, job)
        with suppress(Rejected):  # the timer tries again
            await view.look()
        layout.every(1.0, view.look)


class JobView:
    """The parts of the page, each drawn again when it changes."""

    def __init__(self, api: Api, place: str, job: JsonValue) -> None:
        self._api, self._place, self._job = api, place, job
        self._log_next, self._is_log_read, self._shown_end = 0, False, ""
        with layout.card():
            self._status, self._progress = layout.Live(), layout.Live()
        self._speed = SpeedChart()
        self._results = layout.Live()
        with layout.card("Log"):
            self._log = ui.log(max_lines=LOG_LINES).classes("brim-log brim-mono").props('tabindex=0 aria-label="Log"')
            self._log.set_visibility(False)
            self._no_log = layout.muted("Nothing is logged.")
        with layout.card("Settings"):
            layout.fold_json("Settings as JSON", "Config", job["config"])
            with layout.tools():
                copy_buttons(api.settings, lambda: job_body(job))
                ui.link("New job like this", f"/jobs/new?kind={part(job['kind'])}&like={part(job['id'])}")
        self._show(job)

    async def look(self) -> None:
        """Load its state, also after its end: it may be resumed or deleted from elsewhere."""
        try:
            self._show(await self._api.seen(self._place))
        except Rejected as failure:
            if failure.status == 404:
                self._progress.show("this job was deleted", layout.show_rejection)
            raise
        is_over = self._job["status"] not in UNFINISHED
        if not (is_over and self._is_log_read):
            await self._read_log()
            self._is_log_read = is_over
        if not is_over:
            self._shown_end = ""
        elif self._shown_end != self._job["status"]:
            files = (await self._api.get(f"{self._place}/files"))["files"]
            self._results.show((self._job, files, await self._things()), self._draw_results)
            self._shown_end = self._job["status"]

    async def _things(self) -> dict[tuple[str, str], JsonValue]:
        """The datasets and runs that the job read and made, by sort and id; without those that are deleted."""
        config, result = self._job["config"], self._job["result"] or {}
        datasets = [*config.get("dataset_ids", [])[:NAMED], result.get("dataset_id")]
        ids = [("datasets", id) for id in datasets] + [
            ("runs", id) for id in (config.get("run_id"), result.get("run_id"))
        ]
        things = {}
        for sort, id in dict.fromkeys(ids):
            with suppress(Rejected):
                if id:
                    things[sort, id] = await self._api.seen(f"/api/{sort}/{part(id)}", fresh_s=30.0)
        return things

    def _show(self, job: JsonValue) -> None:
        self._job = job
        self._speed.look(job)
        self._status.show(job["status"], self._draw_status)
        self._progress.show((job, _times(job)), _draw_state)

    def _draw_status(self, status: str) -> None:
        with layout.tools():
            ui.label(status).classes(f"brim-status brim-status-{status}")
            layout.muted(words.kind(self._job["kind"]))
            ui.space()
            for name, (icon, statuses) in _ACTIONS.items():
                if status in statuses:
                    act = self._delete if name == "delete" else partial(self._act, name)
                    colour = "negative" if name == "delete" else "primary"
                    button = ui.button(name.capitalize(), icon=icon, on_click=act)
                    button.props(f"outline dense no-caps color={colour}")

    async def _read_log(self) -> None:
        lines: list[JsonValue] = []
        is_last = False
        while not is_last:
            answer = await self._api.get(f"{self._place}/logs", after=self._log_next, limit=LOG_LINES)
            lines = [*lines, *answer["lines"]][-LOG_LINES:]
            self._log_next, is_last = answer["next"], len(answer["lines"]) < LOG_LINES
        for line in lines:
            is_bad = line["level"].lower() in ("error", "critical")
            text = f"{line['at'][11:19]} {line['level']:<7} {line['text']}"
            self._log.push(text, classes="brim-bad" if is_bad else None)
        if lines:
            self._no_log.set_visibility(False)
            self._log.set_visibility(True)

    def _draw_results(self, ended: tuple[JsonValue, list[JsonValue], dict[tuple[str, str], JsonValue]]) -> None:
        job, files, things = ended
        with layout.tools():
            _draw_links(job, things)
        if job["kind"] == "segment.predict" and files:
            _draw_predicted(job, things)
        if job["result"]:
            with layout.card("Result"):
                _draw_result(job["result"])
        if files:
            with layout.card("Files"):
                ui.link("All as .zip", f"{self._place}/export").props("download")
                for file in files[:LISTED_FILES]:
                    with ui.row(align_items="center"):
                        path = "/".join(part(one) for one in file["name"].split("/"))
                        ui.link(file["name"], f"{self._place}/files/{path}").props("download")
                        layout.muted(words.in_bytes(file["bytes"]))

    async def _act(self, name: str) -> None:
        async with layout.notified():
            job = await self._api.post(f"{self._place}/{name}")
            text = f"The job is {job['status']}."
            if job["status"] in UNFINISHED:
                waits = {"pause": "The job pauses after this batch.", "cancel": "The job stops after this batch."}
                text = waits.get(name, "The job waits for a worker.")
            ui.notify(text, type="positive", position="bottom")
            self._show(job)

    async def _delete(self) -> None:
        text = "Its log and its files are deleted too. Its dataset or run stays."
        if await layout.confirm_delete(f"Delete the job “{self._job['name']}”?", text):
            async with layout.notified():
                await self._api.delete(self._place)
                ui.navigate.to("/jobs")


class SpeedChart:
    """The rate of a job while it runs, as long as the page is open."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        with layout.card("Speed") as self._card:
            self._chart = charts.draw(charts.lines({}), "Rate of the job over time")
        self._card.set_visibility(False)

    def look(self, job: JsonValue) -> None:
        rate = job["progress"]["rate"]
        if job["status"] == "running" and rate:
            self._points = [*self._points, (charts.in_ms(time.time()), rate)][-CHARTED:]
        is_shown = len(self._points) > 1 and job["status"] in UNFINISHED
        self._card.set_visibility(is_shown)
        if is_shown:
            series = {"items per second": self._points}
            charts.redraw(self._chart, charts.lines(series, is_time=True, y_name="/s", from_zero=True))


def draw_progress(job: JsonValue) -> None:
    """A bar, and below it count, rate, time left and the job's message."""
    percent = 100.0 if job["status"] == "completed" else job["progress"]["percent"]
    bar = ui.linear_progress((percent or 0) / 100, show_value=False, size="8px")
    bar.props["indeterminate"] = job["status"] == "running" and percent is None
    bar.props('rounded aria-label="Progress"')
    layout.muted(progress_text(job))


def progress_text(job: JsonValue) -> str:
    """The progress of a job in one line."""
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


def copy_buttons(settings: Settings, body: Callable[[], JsonValue]) -> None:
    """Buttons that copy the request with this body, to be run as it is; the token stays in its file."""
    address, file = _address(settings), settings.token_file.resolve()
    has_file = file.is_file()
    token = f"$(cat {shlex.quote(str(file))})" if has_file else "$BRIM_TOKEN"
    token_file = f" --token-file {shlex.quote(str(file))}" if has_file else ""

    def copy(command: Callable[[JsonValue], str]) -> None:
        ui.clipboard.write(command(body()))
        ui.notify("Copied.", type="positive", position="bottom")

    def curl(body: JsonValue) -> str:
        return (
            f"curl -H \"Authorization: Bearer {token}\" -H 'Content-Type: application/json' \\\n"
            f"  -d {shlex.quote(json.dumps(body, ensure_ascii=False))} \\\n  {address}{JOBS}"
        )

    def brim(body: JsonValue) -> str:
        text = json.dumps(body, ensure_ascii=False, indent=1)
        return f"brim jobs submit - --url {address}{token_file} <<'JSON'\n{text}\nJSON"

    with ui.row().classes("q-gutter-sm"):
        ui.button("Copy as curl", icon="content_copy", on_click=lambda: copy(curl)).props("outline dense no-caps")
        ui.button("Copy as command", icon="terminal", on_click=lambda: copy(brim)).props("outline dense no-caps")


def _address(settings: Settings) -> str:
    """Where this browser reaches the service; behind a proxy that is not where the service listens."""
    headers = ui.context.client.request.headers
    host = headers.get("host")
    return f"{headers.get('x-forwarded-proto', 'http')}://{host}" if host else settings.url


def job_body(job: JsonValue) -> JsonValue:
    """The request that submits the same job again."""
    return {"kind": job["kind"], "name": job["name"], "config": job["config"]}


def _draw_state(state: tuple[JsonValue, str]) -> None:
    job, times = state
    draw_progress(job)
    layout.muted(times)
    if job["error"]:
        layout.show_rejection(job["error"])


def _times(job: JsonValue) -> str:
    by = f" by {job['submitted_by']}" if "submitted_by" in job else ""
    parts = [f"submitted {words.when(job['created_at'])}{by}"]
    if job["started_at"] and (job["finished_at"] or job["status"] == "running"):
        elapsed = words.elapsed(job["started_at"], job["finished_at"])
        parts.append(f"took {elapsed}" if job["finished_at"] else f"running for {elapsed}")
    if job["attempts"] > 1:
        parts.append(f"attempt {job['attempts']}")
    return " · ".join(parts)


def _draw_links(job: JsonValue, things: dict[tuple[str, str], JsonValue]) -> None:
    config, result = job["config"], job["result"] or {}
    for (sort, id), thing in things.items():
        thing_of, made = sort[:-1], result.get(f"{sort[:-1]}_id")
        is_made = id == made and id != config.get(f"{thing_of}_id")
        ui.link(
            f"The {thing_of} it made" if is_made else f"{thing_of.capitalize()} “{thing['name']}”",
            f"/{sort}/{part(id)}",
        )


def _draw_predicted(job: JsonValue, things: dict[tuple[str, str], JsonValue]) -> None:
    """The images with what was predicted in them."""
    for (sort, id), dataset in things.items():
        if sort == "datasets" and dataset["items"]:
            with layout.card(
                "Predicted" if len(job["config"]["dataset_ids"]) == 1 else f"Predicted in {dataset['name']}"
            ):
                has_masks = bool((dataset["about"] or {}).get("masks"))
                ImageGrid(f"/api/datasets/{part(id)}", dataset["items"], has_masks, job["id"])


def _draw_result(result: JsonValue) -> None:
    """Its verdict and numbers and those of its parts as figures; everything as JSON, folded away."""
    numbers = _numbers(result)
    for name, section in result.items():
        if isinstance(section, dict) and name != "overhead":
            prefix = "rejected for " if name == "rejected" else ""
            if isinstance(section.get("verdict"), str):
                ui.label(section["verdict"]).classes("brim-verdict")
            numbers |= {f"{prefix}{key}" if prefix else key: value for key, value in _numbers(section).items()}
    layout.figures(dict(words.figure(name, value) for name, value in list(numbers.items())[:MAX_FIGURES]))
    if spent := result.get("overhead"):
        parts = [f"{name} {words.seconds(value)}" for name, value in spent.items() if value >= 0.05]
        if parts:
            layout.muted(f"Time beside the steps: {', '.join(parts)}.")
    layout.fold_json("Everything as JSON", "More of the result", result)


def _numbers(section: JsonValue) -> dict[str, float]:
    return {name: value for name, value in section.items() if isinstance(value, int | float)}
