"""Jobs: a page of all of them, and one of each with its progress, log, config and results."""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from nicegui import ui

from brim.service.dashboard import words
from brim.service.dashboard.client import Api, JsonValue, Refused, part
from brim.service.dashboard.job_parts import (
    STATUSES,
    TITLES,
    UNFINISHED,
    ProgressBar,
    StatusLabel,
    copy_buttons,
    job_body,
    progress_text,
)
from brim.service.dashboard.layout import card, empty, every, figure, frame, in_words, sentence, show_refusal, tell
from brim.service.dashboard.listing import Listing, page_number

PATH = "/api/training/jobs"
LOG_LINES = 1000  # kept in the page
MAX_FIGURES = 16  # of a result that are shown large; all of it is below
_CAN = {
    "pause": UNFINISHED,
    "cancel": (*UNFINISHED, "paused"),
    "resume": ("paused", "cancelled", "failed"),
    "delete": ("paused", "completed", "failed", "cancelled"),
}
_ICONS = {"pause": "pause", "cancel": "stop", "resume": "play_arrow", "delete": "delete"}


_COLUMNS = {"name": "Name", "status": "Status", "progress": "Progress", "kind": "Kind", "created": "Submitted"}
_CELLS = {
    "status": """<q-td :props="props"><span :class="'brim-status brim-status-' + props.row.status">{{
props.row.status }}</span></q-td>""",
    "progress": """<q-td :props="props"><q-linear-progress v-if="props.row.share !== null"
:value="props.row.share" size="6px" rounded aria-label="Progress"></q-linear-progress>
<div class="brim-muted brim-cut">{{ props.row.progress }}</div></q-td>""",
}


def add(api: Api) -> None:
    @ui.page("/jobs", response_timeout=30)
    async def jobs(status: str = "", kind: str = "", name: str = "", page: str = "1") -> None:
        wanted = {
            "status": status if status in STATUSES else "",
            "kind": kind if kind in TITLES else "",
            "name": name[:200],
            "page": page_number(page),
        }
        with frame("Jobs", "/jobs"):
            filters = ui.row(align_items="center").classes("brim-tools")
            listing = Listing(
                api, "jobs", wanted, path=PATH, columns=_COLUMNS, narrow=("name", "status"), cells=_CELLS, row=_row,
                nothing=_nothing,
            )  # fmt: skip
            with filters:
                _draw_filters(listing, wanted)
        await listing.look()
        every(1.0, listing.look)

    @ui.page("/jobs/{id}", response_timeout=30)
    async def job(id: str) -> None:
        place = f"{PATH}/{part(id)}"
        try:
            found = await api.get(place)
        except Refused as failure:
            with frame("Job", "/jobs"):
                show_refusal(failure)
                ui.link("All jobs", "/jobs")
            return
        with frame(found["name"], "/jobs"):
            shown = JobView(api, place, found)
        with suppress(Refused):  # it is asked again
            await shown.look()
        every(1.0, shown.look)


class JobView:
    """The parts of the page, each changed where the job has."""

    def __init__(self, api: Api, place: str, job: JsonValue) -> None:
        self._api, self._place, self._job = api, place, job
        self._log_next, self._log_ended, self._ended = 0, False, ""
        with card():
            with ui.row(align_items="center").classes("brim-tools"):
                self._status = StatusLabel(job["status"])
                ui.label(TITLES.get(job["kind"], job["kind"])).classes("brim-muted")
                ui.space()
                self._buttons = {name: self._button(name) for name in _CAN}
            self._progress = ProgressBar()
            self._times = ui.label().classes("brim-muted")
            self._error = ui.label().classes("brim-error").props('role="alert"')
            self._links = ui.row().classes("brim-tools")
        self._made = ui.column().classes("brim-stack")
        with card("Log"):
            self._log = ui.log(max_lines=LOG_LINES).classes("brim-log brim-mono").props('tabindex=0 aria-label="Log"')
            self._silent = ui.label("Nothing was logged yet.").classes("brim-muted")
        with card("Config"):
            ui.label(_json(job["config"])).classes("brim-mono brim-log").props('tabindex=0 aria-label="Config"')
            with ui.row(align_items="center").classes("brim-tools"):
                copy_buttons(api.settings, job_body(job))
                ui.link("New job like this", f"/jobs/new?kind={part(job['kind'])}&like={part(job['id'])}")
        self._show(job)

    async def look(self) -> None:
        """Ask how it is, also after its end: it may be resumed, or deleted, from elsewhere."""
        try:
            self._job = await self._api.seen(self._place)
        except Refused as failure:
            if failure.status == 404:
                self._error.set_text("This job was deleted.")
                self._error.set_visibility(True)
            raise
        is_over = self._job["status"] not in UNFINISHED
        self._log_ended = self._log_ended and is_over
        self._show(self._job)
        if not self._log_ended:
            await self._read_log()
            self._log_ended = is_over
        if is_over and self._ended != self._job["status"]:
            self._ended = self._job["status"]
            await self._show_made()

    def _show(self, job: JsonValue) -> None:
        self._status.show(job["status"])
        self._progress.show(job)
        self._times.set_text(_times(job))
        self._error.set_visibility(bool(job["error"]))
        self._error.set_text(sentence(job["error"]) if job["error"] else "")
        for name, button in self._buttons.items():
            button.set_visibility(job["status"] in _CAN[name])
        if job["status"] in UNFINISHED:
            self._ended = ""

    async def _read_log(self) -> None:
        lines: list[JsonValue] = []
        while True:
            found = await self._api.get(f"{self._place}/logs", after=self._log_next, limit=LOG_LINES)
            lines = [*lines, *found["lines"]][-LOG_LINES:]
            self._log_next = found["next"]
            if len(found["lines"]) < LOG_LINES:
                break
        for line in lines:
            bad = line["level"] in ("ERROR", "CRITICAL", "error", "critical")
            text = f"{line['at'][11:19]} {line['level']:<7} {line['text']}"
            self._log.push(text, classes="brim-bad" if bad else None)
        if lines:
            self._silent.set_visibility(False)

    async def _show_made(self) -> None:
        files = (await self._api.get(f"{self._place}/files"))["files"]
        self._links.clear()
        with self._links:
            _draw_links(self._job)
        self._made.clear()
        with self._made:
            if self._job["result"]:
                with card("Result"):
                    _draw_result(self._job["result"])
            if files:
                with card("Files"):
                    for file in files:
                        _draw_file(self._place, file)

    # Changes

    def _button(self, name: str) -> ui.button:
        act = self._delete if name == "delete" else self._ask_for(name)
        colour = "negative" if name == "delete" else "primary"
        return ui.button(name.capitalize(), icon=_ICONS[name], on_click=act).props(
            f"outline dense no-caps color={colour}"
        )

    def _ask_for(self, name: str) -> Callable[[], Awaitable[None]]:
        async def act() -> None:
            async with in_words():
                job = await self._api.post(f"{self._place}/{name}")
                asked = {"pause": "It pauses at its next batch.", "cancel": "It stops at its next batch."}
                tell(
                    asked.get(name, "It waits for a worker.")
                    if job["status"] in UNFINISHED
                    else f"It is {job['status']}."
                )
                self._show(job)

        return act

    async def _delete(self) -> None:
        with ui.dialog() as dialog, ui.card():
            ui.label(f'Delete the job "{self._job["name"]}", its log and its files? Its dataset or run stays.')
            with ui.row().classes("q-gutter-sm"):
                ui.button("Keep it", on_click=lambda: dialog.submit(False)).props("flat no-caps autofocus")
                ui.button("Delete", on_click=lambda: dialog.submit(True)).props("no-caps color=negative")
        if await dialog:
            async with in_words():
                await self._api.delete(self._place)
                ui.navigate.to("/jobs")
        dialog.delete()


def _draw_links(job: JsonValue) -> None:
    config, result = job["config"], job["result"] or {}
    for name, path in (("dataset_id", "datasets"), ("run_id", "runs")):
        if result.get(name) and result[name] != config.get(name):
            ui.link(f"The {path[:-1]} it made", f"/{path}/{part(result[name])}")
    for id in config.get("dataset_ids", []):
        ui.link(f"Dataset {id[:8]} it read", f"/datasets/{part(id)}")
    if config.get("run_id"):
        ui.link(f"Run {config['run_id'][:8]} it used", f"/runs/{part(config['run_id'])}")


def _draw_result(result: JsonValue) -> None:
    figures = dict(_figures(result))
    with ui.row().classes("brim-figures"):
        for name, value in list(figures.items())[:MAX_FIGURES]:
            figure(name.replace("_", " "), words.number(value))
    rest = {name: value for name, value in result.items() if name not in figures and value not in (None, [], {})}
    if rest:
        ui.label(_json(rest)).classes("brim-mono brim-log").props('tabindex=0 aria-label="More of the result"')


def _figures(result: JsonValue) -> Iterator[tuple[str, float]]:
    """Numbers of a result and of the parts of it, by their names."""
    for name, value in result.items():
        if isinstance(value, int | float):
            yield name, value
    for part_of in result.values():
        if isinstance(part_of, dict):
            yield from ((name, value) for name, value in part_of.items() if isinstance(value, int | float))


def _draw_file(place: str, file: JsonValue) -> None:
    path = "/".join(part(one) for one in file["name"].split("/"))
    with ui.row(align_items="center"):
        ui.link(file["name"], f"{place}/files/{path}").props("download")
        ui.label(words.in_bytes(file["bytes"])).classes("brim-muted")


def _times(job: JsonValue) -> str:
    parts = [f"submitted {words.when(job['created_at'])}"]
    if job["started_at"] and job["finished_at"]:
        taken = words.moment(job["finished_at"]) - words.moment(job["started_at"])
        parts.append(f"took {words.seconds(taken.total_seconds())}")
    elif job["started_at"] and job["status"] == "running":
        parts.append(f"runs for {words.since(job['started_at'])}")
    if job["attempts"] > 1:
        parts.append(f"attempt {job['attempts']}")
    return " · ".join(parts)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _draw_filters(listing: Listing, wanted: Mapping[str, Any]) -> None:
    choices = {"status": {status: status for status in STATUSES}, "kind": TITLES}
    for name, options in choices.items():
        select = ui.select({"": "any", **options}, label=name.capitalize(), value=wanted[name])
        select.on_value_change(lambda event, name=name: listing.want(**{name: event.value or ""}))
        select.props("outlined dense").classes("brim-field-short")
    ui.input("Name", value=wanted["name"], on_change=lambda event: listing.want(name=event.value or "")).props(
        'outlined dense debounce=300 clearable type="search"'
    ).classes("brim-field-short")
    ui.space()
    ui.button("New job", icon="add", on_click=lambda: ui.navigate.to("/jobs/new")).props("no-caps unelevated")


def _row(job: JsonValue) -> JsonValue:
    percent = 100.0 if job["status"] == "completed" else job["progress"]["percent"]
    text, created = job["error"] or progress_text(job), words.ago(job["created_at"])
    return {
        "id": job["id"],
        "name": job["name"],
        "status": job["status"],
        "share": None if percent is None else percent / 100,
        "progress": text,
        "kind": job["kind"],
        "created": created,
        "narrow": " · ".join(filter(None, (job["kind"], created, text))),
    }


def _nothing(is_filtered: bool) -> None:
    if is_filtered:
        empty("No job is like that", "Choose other filters.", action="Show all jobs", target="/jobs")
    else:
        text = "A job generates data, trains, evaluates, tunes or predicts; it goes on if anything is killed."
        empty("No jobs yet", text, action="Make the first one", target="/jobs/new")
