"""The lists of jobs and datasets: a table with links, filters, pages, and a hint if it is empty."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from nicegui import ui
from nicegui.element import Element

from brim.jobs.status import KIND_NAMES, STATUSES
from brim.service.dashboard import layout, words
from brim.service.dashboard.client import Api, JsonValue, part
from brim.service.dashboard.dataset import KINDS, UNITS
from brim.service.dashboard.job import JOBS, progress_text

_PHONE: Final = ("name", "status")  # columns that are shown on a phone too
_WIDE: Final = {"classes": "brim-wide", "headerClasses": "brim-wide"}
_LINK: Final = """<q-td :props="props"><a class="brim-row-link" :href="'%s/' + props.row.id">{{ props.row.name }}</a>
<div class="brim-narrow brim-muted">{{ props.row.narrow }}</div></q-td>"""
_STATUS: Final = """<q-td :props="props"><span :class="'brim-status brim-status-' + props.row.status">{{
props.row.status }}</span></q-td>"""
_PROGRESS: Final = """<q-td :props="props"><q-linear-progress v-if="props.row.share !== null"
:value="props.row.share" size="6px" rounded aria-label="Progress"></q-linear-progress>
<div class="brim-muted brim-cut">{{ props.row.progress }}</div></q-td>"""
_HINTS: Final = {  # of an empty list: title, text, next step and its address
    "jobs": ("No jobs yet", "A job generates data, trains, evaluates, tunes or predicts.", "New job", "/jobs/new"),
    "datasets": (
        "No datasets yet",
        "Generate radio samples, upload images or sequences with the button above, or add a folder with "
        '"brim datasets add NAME PATH --kind rf|images|sequences".',
        "Generate radio samples",
        "/jobs/new?kind=rf.generate",
    ),
}


def add(api: Api) -> None:
    @ui.page("/jobs", response_timeout=30)
    async def jobs(status: str = "", kind: str = "", name: str = "", page: str = "1") -> None:
        columns = {"name": "Name", "status": "Status", "progress": "Progress", "kind": "Kind", "created": "Submitted"}
        filters = {
            "status": {one: one for one in STATUSES},
            "kind": {one: words.kind(one) for one in KIND_NAMES},
            "name": {},
        }
        chosen = {"status": status, "kind": kind, "name": name[:200]}
        with layout.frame("Jobs", "/jobs"):
            listing = Listing(api, JOBS, columns, _job_row, page, filters, chosen)
            with listing.tools:
                _link_button("New job", "/jobs/new")
        await listing.start()

    @ui.page("/datasets", response_timeout=30)
    async def datasets(kind: str = "", page: str = "1") -> None:
        columns = {
            "name": "Name", "kind": "Kind", "items": "Items", "size": "Size", "state": "State", "created": "Made"
        }  # fmt: skip
        with layout.frame("Datasets", "/datasets"):
            listing = Listing(api, "/api/datasets", columns, _dataset_row, page, {"kind": KINDS}, {"kind": kind})
            with listing.tools:
                form = _upload_form()
                ui.button("Upload files", icon="upload", on_click=form.open).props("no-caps outline")
                _link_button("Generate", "/jobs/new?kind=rf.generate")
        await listing.start()


class Listing:
    """Newest first, 50 a page; page and filters are part of the address."""

    def __init__(
        self,
        api: Api,
        path: str,
        columns: Mapping[str, str],
        row: Callable[[JsonValue], JsonValue],
        page: str,
        filters: Mapping[str, Mapping[str, str]],
        chosen: Mapping[str, str],
    ) -> None:
        """The list at a path of the API.

        columns  titles by name
        row      the cells of a row, and the `narrow` text shown on a phone
        filters  titles by value; without any, the filter is a text
        chosen   values of the filters; an unknown one is ignored
        """
        self._api, self._path, self._row, self._sort = api, path, row, path.rpartition("/")[2]
        self._wanted: dict[str, Any] = {
            name: chosen[name] if not values or chosen[name] in values else "" for name, values in filters.items()
        }
        self._wanted["page"] = page_number(page)
        with layout.tools() as self.tools:
            for name, values in filters.items():
                self._draw_filter(name, values)
            ui.space()
        self._notice = layout.Live()
        shown = [
            {"name": name, "label": label, "field": name, "align": "left", **({} if name in _PHONE else _WIDE)}
            for name, label in columns.items()
        ]
        self._table = ui.table(rows=[], columns=shown, row_key="id").classes("brim-table brim-jobs")
        self._table.props(f'flat bordered hide-bottom aria-label="{self._sort.capitalize()}"')
        for cell, template in {"name": _LINK % f"/{self._sort}", "status": _STATUS, "progress": _PROGRESS}.items():
            self._table.add_slot(f"body-cell-{cell}", template)
        with ui.row(align_items="center") as self._pager:
            self._newer, self._where, self._older = self._button("Newer", -1), ui.label(), self._button("Older", 1)

    async def start(self) -> None:
        await self._look()
        layout.every(1.0, self._look)

    def _draw_filter(self, name: str, values: Mapping[str, str]) -> None:
        async def change(event: Any) -> None:
            await self._want(page=1, **{name: event.value or ""})

        if values:
            options = {"": "any", **values}
            field: Any = ui.select(options, label=name.capitalize(), value=self._wanted[name], on_change=change)
        else:
            field = ui.input(name.capitalize(), value=self._wanted[name], on_change=change)
            field.props('debounce=300 clearable type="search"')
        field.props("outlined dense").classes("brim-field-short")

    def _button(self, name: str, pages: int) -> ui.button:
        icon = "chevron_left" if pages < 0 else "chevron_right"
        button = ui.button(icon=icon, on_click=lambda: self._want(page=self._wanted["page"] + pages))
        return button.props(f'flat round dense aria-label="{name} {self._sort}"')

    async def _want(self, **changed: Any) -> None:
        self._wanted |= changed
        query = "&".join(f"{name}={part(str(value))}" for name, value in self._wanted.items() if value not in ("", 1))
        ui.navigate.history.replace(f"/{self._sort}?{query}" if query else f"/{self._sort}")
        await self._look()

    async def _look(self) -> None:
        """Load the current page; unchanged rows are not sent to the browser."""
        wanted = dict(self._wanted)
        async with self._notice.rejections():
            answer = await self._api.seen(self._path, **wanted)
            if wanted == self._wanted:  # otherwise another page was chosen meanwhile
                self._show(answer)

    def _show(self, answer: JsonValue) -> None:
        rows = [{"id": one["id"], "name": one["name"], **self._row(one)} for one in answer[self._sort]]
        if rows != self._table.rows:
            self._table.rows = rows
        page, pages = answer["page"], answer["pages"]
        self._table.set_visibility(bool(rows))
        self._pager.set_visibility(pages > 1)
        self._where.set_text(f"Page {page} of {pages} · {words.number(answer['total'])} {self._sort}")
        self._newer.set_enabled(page > 1)
        self._older.set_enabled(page < pages)
        hint = _HINTS[self._sort]
        if any(value not in ("", 1) for value in self._wanted.values()):
            text = "Change the filters, or go back to the whole list."
            hint = (f"No {self._sort} match", text, f"Show all {self._sort}", f"/{self._sort}")
        self._notice.show(() if rows else hint, lambda hint: layout.empty(*hint) if hint else None)


def page_number(text: str) -> int:
    """The page number in an address; 1 if it is invalid."""
    return max(1, int(text)) if text.isdecimal() and len(text) < 6 else 1


def _link_button(text: str, target: str) -> None:
    ui.button(text, icon="add", on_click=lambda: ui.navigate.to(target)).props("no-caps unelevated")


class UploadForm(Element, component=Path(__file__).with_name("upload_view.js")):
    """A form whose files go from the browser straight to the API."""


def _upload_form() -> ui.dialog:
    with ui.dialog() as dialog, ui.card().classes("brim-dialog"):
        layout.heading("Upload a dataset")
        form = UploadForm()
        form.on("uploaded", lambda event: ui.navigate.to(f"/datasets/{part(str(event.args))}"))
        form.on("leave", dialog.close)
    return dialog


def _job_row(job: JsonValue) -> JsonValue:
    percent = 100.0 if job["status"] == "completed" else job["progress"]["percent"]
    text, created = job["error"] or progress_text(job), words.ago(job["created_at"])
    return {
        "status": job["status"],
        "share": None if percent is None else percent / 100,
        "progress": text,
        "kind": words.kind(job["kind"]),
        "created": created,
        "narrow": " · ".join(filter(None, (words.kind(job["kind"]), created, text))),
    }


def _dataset_row(dataset: JsonValue) -> JsonValue:
    items, size = words.number(dataset["items"]), words.in_bytes(dataset["bytes"])
    return {
        "kind": KINDS[dataset["kind"]],
        "items": items,
        "size": size,
        "state": dataset["state"],
        "created": words.ago(dataset["created_at"]),
        "narrow": f"{items} {UNITS[dataset['kind']]} · {size} · {dataset['state']}",
    }
