"""Segment: drop an image, see what a model finds in it, and take the polygons along."""

from pathlib import Path

from nicegui import ui
from nicegui.element import Element

from brim.service.dashboard.client import Api, JsonValue, Refused
from brim.service.dashboard.layout import card, empty, every, frame, show_refusal

THRESHOLD = 0.5
_HOW = 'Add one with "brim models add NAME RUN", where RUN is the folder of a run or a file of weights.'


def add(api: Api) -> None:
    @ui.page("/segment")
    async def segment() -> None:
        async def look() -> None:
            if await _models(api):
                ui.navigate.reload()

        with frame("Segment", "/segment"):
            try:
                models = await _models(api)
            except Refused as failure:
                return show_refusal(failure)
            if models:
                _draw(models)
            else:
                every(2.0, look)
                empty(
                    "No segmentation model yet",
                    f"{_HOW} This page will see it.",
                    action="Train one on images of yours",
                    target="/jobs/new?kind=segment.train",
                )
        return None


async def _models(api: Api) -> list[JsonValue]:
    return [one for one in (await api.seen("/api/models"))["models"] if one["kind"] == "segment"]


class View(Element, component=Path(__file__).with_name("segment_view.js")):
    """Drop zone, image, polygons and downloads; all of it happens in the browser, which asks the API itself."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._props |= {"model": model, "threshold": THRESHOLD, "detect-holes": True}

    def choose(self, name: str, value: object) -> None:
        """Another model, threshold or detect-holes; an image that is there is asked about again."""
        self._props[name] = value
        self.update()


def _draw(models: list[JsonValue]) -> None:
    names = {one["name"]: f"{one['name']} · {one['network']}" for one in models}
    first = next(iter(names))
    with card():
        with ui.row(align_items="center").classes("brim-tools"):
            model = ui.select(names, label="Model", value=first).props("outlined dense").classes("brim-field-short")
            with ui.column().classes("brim-slider"):
                told = ui.label(_above(THRESHOLD)).classes("brim-muted")
                threshold = ui.slider(min=0.01, max=0.99, step=0.01, value=THRESHOLD).props(
                    'dense label aria-label="Threshold"'
                )
            holes = ui.switch("Find holes", value=True)
        view = View(first)
    model.on_value_change(lambda event: view.choose("model", event.value))
    threshold.on_value_change(lambda event: told.set_text(_above(event.value)))
    threshold.on_value_change(lambda event: view.choose("threshold", event.value))
    holes.on_value_change(lambda event: view.choose("detect-holes", event.value))


def _above(threshold: float) -> str:
    return f"Threshold: inside is what is above {threshold:.2f}"
