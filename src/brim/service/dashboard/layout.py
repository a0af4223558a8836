"""What all pages share: frame and navigation, light and dark, cards, figures, tables, dialogs, rejections in words."""

import html
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from nicegui import context, ui
from nicegui.element import Element

from brim.service.dashboard import words
from brim.service.dashboard.client import Api, JsonValue, Rejected
from brim.service.settings import ACTOR

PAGES: Final = {
    "/": "Now", "/jobs": "Jobs", "/datasets": "Datasets", "/runs": "Runs", "/tuning": "Tuning", "/segment": "Segment",
    "/locate": "Locate", "/why": "Why",
}  # fmt: skip
_T = TypeVar("_T")
STYLE: Final = Path(__file__).with_name("style.css").read_text()
# before the first paint: the choice made in this browser, or else its system's
_DARK: Final = """<script>
window.brimDark = (value) => { localStorage.setItem("brim-dark", value); Quasar.Dark.set(value); };
document.addEventListener("DOMContentLoaded", () => {
  const kept = localStorage.getItem("brim-dark");
  if (kept !== null) setTimeout(() => Quasar.Dark.set(kept === "true"), 0);
});
</script>"""


@contextmanager
def frame(title: str, path: str) -> Iterator[None]:
    """A page with header and navigation, where it is at path; shows what the API rejects while it is drawn."""
    ui.page_title(f"{title} · brim")
    ui.add_head_html(f"<style>{STYLE}</style>{_DARK}")
    with ui.row(align_items="center").classes("brim-header").props('role="navigation" aria-label="Pages"'):
        ui.link("brim", "/").classes("brim-name")
        for place, name in PAGES.items():
            link = ui.link(name, place)
            if place == path:
                link.props('aria-current="page"')
        ui.space()
        if actor := context.client.request.headers.get(ACTOR):
            ui.label(actor).classes("brim-muted")
            ui.link("Sign out", "/auth/logout")
        ui.link("API", "/docs")
        ui.button(icon="contrast", on_click=lambda: ui.run_javascript("brimDark(!Quasar.Dark.isActive)")).props(
            'flat round dense color=grey-7 aria-label="Light or dark"'
        )
    with ui.column().classes("brim-page").props('role="main"'):
        ui.html(html.escape(title), sanitize=False, tag="h1")
        try:
            yield
        except Rejected as failure:
            show_rejection(failure.detail)


@contextmanager
def card(title: str = "") -> Iterator[ui.card]:
    with ui.card().classes("brim-card") as drawn:
        if title:
            heading(title)
        yield drawn


class Live(ui.column):
    """A part of a page that is drawn again when its data changes."""

    def __init__(self) -> None:
        super().__init__()
        self.classes("brim-stack")
        self._data: object = ...  # nothing is drawn yet

    def show(self, data: _T, draw: Callable[[_T], object]) -> None:
        if data != self._data:
            self._data = data
            self.clear()
            with self:
                draw(data)

    @asynccontextmanager
    async def rejections(self) -> AsyncIterator[None]:
        """What the API rejects in here is shown in this part of the page."""
        try:
            yield
        except Rejected as failure:
            self.show(failure.detail, show_rejection)


async def load(api: Api, place: str, path: str) -> JsonValue | None:
    """What a page is about; None if the API rejects the request, which the page then shows. Path is the list's."""
    try:
        return await api.get(place)
    except Rejected as failure:
        with frame(PAGES[path].removesuffix("s"), path):
            show_rejection(failure.detail)
            ui.link(f"All {path[1:]}", path)
        return None


def heading(text: str) -> None:
    ui.html(html.escape(text), sanitize=False, tag="h2")


def muted(text: str) -> ui.label:
    return ui.label(text).classes("brim-muted")


def tools() -> ui.row:
    """A row of buttons, links and fields."""
    return ui.row(align_items="center").classes("brim-tools")


def empty(title: str, text: str, action: str = "", target: str = "") -> None:
    """Where there is nothing yet: what to do next, and where."""
    with ui.column().classes("brim-empty"):
        heading(title)
        ui.label(text)
        if action:
            ui.link(action, target).classes("q-mt-sm")


def figures(values: Mapping[str, str]) -> None:
    """Values in a row, each above its name."""
    with ui.row().classes("brim-figures"):
        for name, value in values.items():
            with ui.element("div").classes("brim-figure"):
                with ui.element("b"):
                    ui.label(value)
                with ui.element("span"):
                    ui.label(name)


def draw_json(label: str, value: JsonValue) -> None:
    text = words.NONE if value is None else json.dumps(value, indent=2, ensure_ascii=False)
    ui.label(text).classes("brim-mono brim-log").props(f'tabindex=0 aria-label="{label}"')


def fold_json(title: str, label: str, value: JsonValue) -> None:
    """JSON for those who want it: closed until it is opened."""
    with ui.expansion(title, icon="data_object").classes("brim-fold"):
        draw_json(label, value)


class TextFile(Element, component=Path(__file__).with_name("text_file.js")):
    """A field for a small file; its event "text" has what is in it."""

    def __init__(self, label: str, accept: str) -> None:
        super().__init__()
        self._props |= {"label": label, "accept": accept}


class Link(NamedTuple):
    """A cell of a table that leads somewhere."""

    text: str
    target: str


def draw_table(label: str, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Rows of texts and numbers below their names; label is for screen readers."""
    if not rows:
        return
    table = ui.element("table").classes("brim-plain-table").props(f'aria-label="{label}"')
    table.move(ui.element("div").classes("brim-scroll").props("tabindex=0"))  # scrolled by keys as well
    with table:
        with ui.element("thead"):
            _draw_row("th", names)
        with ui.element("tbody"):
            for row in rows:
                _draw_row("td", row)


def _draw_row(tag: str, values: Sequence[Any]) -> None:
    with ui.element("tr"):
        for value in values:
            with ui.element(tag):
                if isinstance(value, Link):
                    ui.link(*value)
                else:
                    ui.label(words.number(value))


def show_rejection(detail: str) -> None:
    """What the API rejected, in the page."""
    with ui.element("div").classes("brim-error").props('role="alert"'):
        ui.label(sentence(detail))


@asynccontextmanager
async def notified() -> AsyncIterator[None]:
    """What the API rejects in here is shown as a notification."""
    try:
        yield
    except Rejected as failure:
        ui.notify(sentence(failure.detail), type="negative", position="bottom")


async def confirm_delete(question: str, text: str) -> bool:
    with ui.dialog() as dialog, ui.card().classes("brim-dialog"):
        heading(question)
        ui.label(text)
        with ui.row().classes("brim-tools justify-end"):
            ui.button("Keep it", on_click=lambda: dialog.submit(False)).props("flat no-caps autofocus")
            ui.button("Delete it", on_click=lambda: dialog.submit(True)).props("unelevated no-caps color=negative")
    is_sure = bool(await dialog)
    dialog.delete()
    return is_sure


def every(seconds: float, work: Callable[[], Awaitable[Any]]) -> None:
    """Repeat while the page is open; what the API rejects is tried again the next time."""

    async def once() -> None:
        with suppress(Rejected):
            await work()

    ui.timer(seconds, once)


def sentence(text: str) -> str:
    """A message of the API with a capital and a full stop."""
    text = text.strip()
    is_name = any(letter in text.partition(" ")[0] for letter in "._=[")  # of a field, which is written as it is
    first = text[:1] if is_name else text[:1].upper()
    return first + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")
