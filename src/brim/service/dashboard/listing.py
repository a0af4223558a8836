"""A page that lists things: a table with links, paging, and a text if it is empty."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import words
from brim.service.dashboard.client import Api, JsonValue, Refused, part
from brim.service.dashboard.layout import show_refusal

WIDE: Final = {"classes": "brim-wide", "headerClasses": "brim-wide"}  # not on a phone
_LINK: Final = """<q-td :props="props"><a class="brim-row-link" :href="'%s/' + props.row.id">{{ props.row.name }}</a>
<div class="brim-narrow brim-muted">{{ props.row.narrow }}</div></q-td>"""


class Listing:
    """Things of one sort, newest first, 50 a page; page and filters are part of the address."""

    def __init__(
        self,
        api: Api,
        sort: str,
        wanted: dict[str, Any],
        *,
        columns: dict[str, str],
        row: Callable[[JsonValue], JsonValue],
        nothing: Callable[[bool], None],
        path: str = "",
        narrow: tuple[str, ...] = ("name",),
        cells: Mapping[str, str] | None = None,
    ) -> None:
        """A table of one sort, such as datasets, which is part of the addresses.

        row      makes the cells of a row, with its id, and the `narrow` text shown on a phone
        nothing  draws the empty state; its argument says whether a filter is the reason
        path     of the API, if it is not /api/SORT
        narrow   columns that are shown on a phone too
        cells    Vue templates by column
        """
        self._api, self._sort, self._wanted, self._row, self._nothing = api, sort, wanted, row, nothing
        self._path = path or f"/api/{sort}"
        self._notice = ui.column().classes("brim-stack")
        shown = [
            {"name": name, "label": label, "field": name, "align": "left", **({} if name in narrow else WIDE)}
            for name, label in columns.items()
        ]
        self._table = ui.table(rows=[], columns=shown, row_key="id").classes("brim-table brim-jobs")
        self._table.props(f'flat bordered hide-bottom aria-label="{sort.capitalize()}"')
        for cell, template in {"name": _LINK % f"/{sort}", **(cells or {})}.items():
            self._table.add_slot(f"body-cell-{cell}", template)
        with ui.row(align_items="center") as self._pager:
            self._before = ui.button(icon="chevron_left", on_click=lambda: self._turn(-1))
            self._before.props(f'flat round dense aria-label="Newer {sort}"')
            self._where = ui.label()
            self._after = ui.button(icon="chevron_right", on_click=lambda: self._turn(1))
            self._after.props(f'flat round dense aria-label="Older {sort}"')
        self._drawn: object = ""

    async def look(self) -> None:
        """Load the current page; unchanged rows are not sent to the browser."""
        wanted = dict(self._wanted)
        try:
            found = await self._api.seen(self._path, **wanted)
        except Refused as failure:
            return self._say(failure.detail, partial(show_refusal, failure))
        if wanted == self._wanted:  # otherwise another page was chosen meanwhile
            self._show(found)
        return None

    async def want(self, **changed: Any) -> None:
        """Show another page, or with another filter."""
        self._wanted |= {"page": 1} | changed
        given = "&".join(f"{name}={part(str(value))}" for name, value in self._wanted.items() if value not in ("", 1))
        ui.navigate.history.replace(f"/{self._sort}?{given}" if given else f"/{self._sort}")
        await self.look()

    async def _turn(self, pages: int) -> None:
        await self.want(page=self._wanted["page"] + pages)

    def _show(self, found: JsonValue) -> None:
        rows = [self._row(one) for one in found[self._sort]]
        if rows != self._table.rows:
            self._table.rows = rows
        self._table.set_visibility(bool(rows))
        self._pager.set_visibility(found["pages"] > 1)
        self._where.set_text(f"Page {found['page']} of {found['pages']} · {words.number(found['total'])} {self._sort}")
        self._before.set_enabled(found["page"] > 1)
        self._after.set_enabled(found["page"] < found["pages"])
        if rows:
            return self._say("", lambda: None)
        is_filtered = any(value not in ("", 1) for value in self._wanted.values())
        return self._say(is_filtered, lambda: self._nothing(is_filtered))

    def _say(self, notice: object, draw: Callable[[], None]) -> None:
        if notice != self._drawn or type(notice) is not type(self._drawn):
            self._drawn = notice
            self._notice.clear()
            with self._notice:
                draw()


def page_number(text: str) -> int:
    """The page number in an address; 1 if it is invalid."""
    return max(1, int(text)) if text.isdecimal() and len(text) < 6 else 1
