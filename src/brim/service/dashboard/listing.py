"""A page of many things: a table whose rows lead to them, the way to other pages, and words where it is empty."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import words
from brim.service.dashboard.client import Api, Json, Refused, part
from brim.service.dashboard.layout import show_refusal

WIDE: Final = {"classes": "brim-wide", "headerClasses": "brim-wide"}  # not on a phone
_LINK: Final = """<q-td :props="props"><a class="brim-row-link" :href="'%s/' + props.row.id">{{ props.row.name }}</a>
<div class="brim-narrow brim-muted">{{ props.row.narrow }}</div></q-td>"""


class Listing:
    """Things of one sort, newest first, 50 a page; the address keeps what is wanted."""

    def __init__(
        self,
        api: Api,
        sort: str,
        wanted: dict[str, Any],
        *,
        columns: dict[str, str],
        row: Callable[[Json], Json],
        nothing: Callable[[bool], None],
    ) -> None:
        """Take the sort, such as datasets, which is part of the addresses; the first column is the name.

        row makes cells by column, with the id, and `narrow` to be said on a phone; nothing draws the empty state, told
        whether a filter is why.
        """
        self._api, self._sort, self._wanted, self._row, self._nothing = api, sort, wanted, row, nothing
        self._told = ui.column().classes("brim-stack")
        shown = [
            {"name": name, "label": label, "field": name, "align": "left", **(WIDE if at else {})}
            for at, (name, label) in enumerate(columns.items())
        ]
        self._table = ui.table(rows=[], columns=shown, row_key="id").classes("brim-table brim-jobs")
        self._table.props(f'flat bordered hide-bottom aria-label="{sort.capitalize()}"')
        self._table.add_slot("body-cell-name", _LINK % f"/{sort}")
        with ui.row(align_items="center") as self._pager:
            self._before = ui.button(icon="chevron_left", on_click=lambda: self._turn(-1))
            self._before.props(f'flat round dense aria-label="Newer {sort}"')
            self._where = ui.label()
            self._after = ui.button(icon="chevron_right", on_click=lambda: self._turn(1))
            self._after.props(f'flat round dense aria-label="Older {sort}"')
        self._said: object = ""

    async def look(self) -> None:
        """Ask for the page that is wanted; what is as it was is not sent."""
        asked = dict(self._wanted)
        try:
            found = await self._api.seen(f"/api/{self._sort}", **asked)
        except Refused as failure:
            return self._say(failure.detail, partial(show_refusal, failure))
        if asked == self._wanted:  # else another was chosen meanwhile, and is on its way
            self._show(found)
        return None

    async def want(self, **changed: Any) -> None:
        """Look at others."""
        self._wanted |= {"page": 1} | changed
        given = "&".join(f"{name}={part(str(value))}" for name, value in self._wanted.items() if value not in ("", 1))
        ui.navigate.history.replace(f"/{self._sort}?{given}" if given else f"/{self._sort}")
        await self.look()

    async def _turn(self, pages: int) -> None:
        await self.want(page=self._wanted["page"] + pages)

    def _show(self, found: Json) -> None:
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

    def _say(self, said: object, draw: Callable[[], None]) -> None:
        if said != self._said or type(said) is not type(self._said):
            self._said = said
            self._told.clear()
            with self._told:
                draw()


def page_number(text: str) -> int:
    """Of an address; the first where it is none."""
    return max(1, int(text)) if text.isdecimal() and len(text) < 6 else 1
