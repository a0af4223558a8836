"""What all pages share: the frame with its navigation, light and dark, empty states, refusals in words, figures."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import words
from brim.service.dashboard.client import Refused

PAGES: Final = {
    "/": "Now",
    "/jobs": "Jobs",
    "/datasets": "Datasets",
    "/runs": "Runs",
    "/tuning": "Tuning",
    "/segment": "Segment",
}
STYLE: Final = Path(__file__).with_name("style.css").read_text()
# before the first paint: the choice of this browser, or else that of its system
_DARK: Final = """<script>
window.brimDark = (value) => { localStorage.setItem("brim-dark", value); Quasar.Dark.set(value); };
document.addEventListener("DOMContentLoaded", () => {
  const kept = localStorage.getItem("brim-dark");
  if (kept !== null) setTimeout(() => Quasar.Dark.set(kept === "true"), 0);
});
</script>"""


@contextmanager
def frame(title: str, path: str) -> Iterator[ui.column]:
    """A page: header, navigation, and a column for what it shows; path is that of its entry in the navigation."""
    ui.page_title(f"{title} · brim")
    ui.add_head_html(f"<style>{STYLE}</style>{_DARK}")
    with ui.row(align_items="center").classes("brim-header").props('role="navigation" aria-label="Pages"'):
        ui.link("brim", "/").classes("brim-name")
        for place, name in PAGES.items():
            link = ui.link(name, place)
            if place == path:
                link.props('aria-current="page"')
        ui.space()
        ui.link("API", "/docs")
        ui.button(icon="contrast", on_click=lambda: ui.run_javascript("brimDark(!Quasar.Dark.isActive)")).props(
            'flat round dense color=grey-7 aria-label="Light or dark"'
        )
    with ui.column().classes("brim-page").props('role="main"') as column:
        ui.html(_escaped(title), sanitize=False, tag="h1")
        yield column


@contextmanager
def card(title: str = "") -> Iterator[ui.card]:
    """A card with a title."""
    with ui.card().classes("brim-card") as made:
        if title:
            heading(title)
        yield made


def heading(text: str) -> ui.html:
    """A heading inside a page."""
    return ui.html(_escaped(text), sanitize=False, tag="h2")


def empty(title: str, text: str, *, action: str = "", target: str = "") -> None:
    """Where there is nothing yet: what to do next, and where."""
    with ui.column().classes("brim-empty"):
        heading(title)
        ui.label(text)
        if action:
            ui.link(action, target).classes("q-mt-sm")


def figure(name: str, value: str) -> ui.label:
    """A number with its name; the label is returned to be changed."""
    with ui.element("div").classes("brim-figure"):
        with ui.element("b"):
            shown = ui.label(value)
        with ui.element("span"):
            ui.label(name)
    return shown


def show_refusal(failure: Refused) -> None:
    """A refusal in words, in the page."""
    with ui.element("div").classes("brim-error").props('role="alert"'):
        ui.label(sentence(failure.detail))


def tell(text: str, *, bad: bool = False) -> None:
    """A word that passes by."""
    ui.notify(sentence(text), type="negative" if bad else "positive", position="bottom")


@asynccontextmanager
async def in_words() -> AsyncIterator[None]:
    """What the API refuses in here is told in words."""
    try:
        yield
    except Refused as failure:
        tell(failure.detail, bad=True)


def every(seconds: float, work: Callable[[], Awaitable[Any]]) -> ui.timer:
    """Do it about as often, while the page is open; a refusal waits for the next time."""

    async def once() -> None:
        try:
            await work()
        except Refused:
            return

    return ui.timer(seconds, once)


def sentence(text: str) -> str:
    """As the API says it, with a capital and a full stop."""
    text = text.strip()
    is_name = any(letter in text.partition(" ")[0] for letter in "._=[")  # of a field, which is written as it is
    first = text[:1] if is_name else text[:1].upper()
    return first + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def draw_table(label: str, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Rows of texts and numbers below their names; label is for who cannot see it."""
    if not rows:
        return
    table = ui.element("table").classes("brim-plain-table").props(f'aria-label="{label}"')
    table.move(ui.element("div").classes("brim-scroll"))
    with table:
        with ui.element("thead"), ui.element("tr"):
            for name in names:
                _cell("th", name)
        with ui.element("tbody"):
            for row in rows:
                with ui.element("tr"):
                    for value in row:
                        _cell("td", words.number(value))


def _cell(tag: str, text: str) -> None:
    with ui.element(tag):
        ui.label(text)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
