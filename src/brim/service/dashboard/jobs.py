"""Jobs: all of them, newest first, with filters; what runs moves."""

from functools import partial
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import words
from brim.service.dashboard.client import Api, Json, Refused, part
from brim.service.dashboard.job_parts import STATUSES, TITLES, progress_text
from brim.service.dashboard.layout import empty, every, frame, show_refusal

_WIDE: Final = {"classes": "brim-wide", "headerClasses": "brim-wide"}  # not on a phone
_COLUMNS: Final = [
    {"name": "name", "label": "Name", "field": "name", "align": "left"},
    {"name": "status", "label": "Status", "field": "status", "align": "left"},
    {"name": "progress", "label": "Progress", "field": "text", "align": "left", **_WIDE},
    {"name": "kind", "label": "Kind", "field": "kind", "align": "left", **_WIDE},
    {"name": "created", "label": "Submitted", "field": "created", "align": "left", **_WIDE},
]
_CELLS: Final = {
    "name": """<q-td :props="props"><a class="brim-row-link" :href="'/jobs/' + props.row.id">{{ props.row.name }}</a>
<div class="brim-narrow brim-muted">{{ props.row.kind }} · {{ props.row.created }}<br>{{ props.row.text }}</div>
</q-td>""",
    "status": """<q-td :props="props"><span :class="'brim-status brim-status-' + props.row.status">{{
props.row.status }}</span></q-td>""",
    "progress": """<q-td :props="props"><q-linear-progress v-if="props.row.share !== null"
:value="props.row.share" size="6px" rounded aria-label="Progress"></q-linear-progress>
<div class="brim-muted brim-cut">{{ props.row.text }}</div></q-td>""",
}


def add(api: Api) -> None:
    """The page."""

    @ui.page("/jobs", response_timeout=30)
    async def jobs(status: str = "", kind: str = "", name: str = "", page: str = "1") -> None:
        wanted = {
            "status": status if status in STATUSES else "",
            "kind": kind if kind in TITLES else "",
            "name": name[:200],
            "page": int(page) if page.isdecimal() and len(page) < 6 else 1,
        }
        with frame("Jobs", "/jobs"):
            listed = Listed(api, wanted)
        await listed.look()
        every(1.0, listed.look)


class Listed:
    """The filters, a page of jobs, and the way to the others."""

    def __init__(self, api: Api, wanted: dict[str, Any]) -> None:
        """Take what the address says."""
        self._api, self._wanted = api, wanted
        with ui.row(align_items="center").classes("brim-tools"):
            self._select("status", "Status", {"": "any", **{status: status for status in STATUSES}})
            self._select("kind", "Kind", {"": "any", **TITLES})
            ui.input("Name", value=wanted["name"], on_change=lambda event: self._filter("name", event.value)).props(
                'outlined dense debounce=300 clearable type="search"'
            ).classes("brim-field-short")
            ui.space()
            ui.button("New job", icon="add", on_click=lambda: ui.navigate.to("/jobs/new")).props("no-caps unelevated")
        self._told = ui.column().classes("brim-stack")
        self._table = ui.table(rows=[], columns=_COLUMNS, row_key="id").classes("brim-table brim-jobs")
        self._table.props('flat bordered dense hide-bottom aria-label="Jobs"')
        for cell, template in _CELLS.items():
            self._table.add_slot(f"body-cell-{cell}", template)
        with ui.row(align_items="center") as self._pager:
            self._before = ui.button(icon="chevron_left", on_click=lambda: self._turn(-1))
            self._before.props('flat round dense aria-label="Newer jobs"')
            self._where = ui.label()
            self._after = ui.button(icon="chevron_right", on_click=lambda: self._turn(1))
            self._after.props('flat round dense aria-label="Older jobs"')
        self._said = ""

    async def look(self) -> None:
        """Ask for the page that is wanted; what is as it was is not sent."""
        asked = dict(self._wanted)
        try:
            found = await self._api.seen("/api/training/jobs", **asked)
        except Refused as failure:
            return self._say(failure.detail, partial(show_refusal, failure))
        if asked == self._wanted:  # else another was chosen meanwhile, and is on its way
            self._show(found)
        return None

    def _show(self, found: Json) -> None:
        rows = [_row(job) for job in found["jobs"]]
        if rows != self._table.rows:
            self._table.rows = rows
        self._table.set_visibility(bool(rows))
        self._pager.set_visibility(found["pages"] > 1)
        self._where.set_text(f"Page {found['page']} of {found['pages']} · {words.number(found['total'])} jobs")
        self._before.set_enabled(found["page"] > 1)
        self._after.set_enabled(found["page"] < found["pages"])
        if rows:
            return self._say("", lambda: None)
        is_filtered = any(self._wanted[name] for name in ("status", "kind", "name"))
        return self._say("nothing like it" if is_filtered else "nothing", lambda: _nothing(is_filtered))

    def _say(self, said: str, draw: Any) -> None:
        if said != self._said:
            self._said = said
            self._told.clear()
            with self._told:
                draw()

    def _select(self, name: str, label: str, options: dict[str, str]) -> None:
        chosen = ui.select(options, label=label, value=self._wanted[name])
        chosen.on_value_change(lambda event: self._filter(name, event.value))
        chosen.props("outlined dense").classes("brim-field-short")

    async def _filter(self, name: str, value: str | None) -> None:
        await self._want(**{name: value or "", "page": 1})

    async def _turn(self, pages: int) -> None:
        await self._want(page=self._wanted["page"] + pages)

    async def _want(self, **changed: Any) -> None:
        self._wanted |= changed
        given = "&".join(f"{name}={part(str(value))}" for name, value in self._wanted.items() if value not in ("", 1))
        ui.navigate.history.replace(f"/jobs?{given}" if given else "/jobs")
        await self.look()


def _row(job: Json) -> Json:
    percent = 100.0 if job["status"] == "completed" else job["progress"]["percent"]
    return {
        "id": job["id"],
        "name": job["name"],
        "status": job["status"],
        "share": None if percent is None else percent / 100,
        "text": job["error"] or progress_text(job),
        "kind": job["kind"],
        "created": words.ago(job["created_at"]),
    }


def _nothing(is_filtered: bool) -> None:
    if is_filtered:
        empty("No job is like that", "Choose other filters.", action="Show all jobs", target="/jobs")
    else:
        text = "A job generates data, trains, evaluates, tunes or predicts; it goes on if anything is killed."
        empty("No jobs yet", text, action="Make the first one", target="/jobs/new")
