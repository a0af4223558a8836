"""Segment: drop an image, see the objects that a model finds in it, download their polygons."""

from pathlib import Path

from nicegui import ui
from nicegui.element import Element

from brim.segmentation.config import DEFAULT_MODEL, DEFAULT_NETWORK
from brim.service.dashboard import layout
from brim.service.dashboard.client import Api, JsonValue, Rejected, part

THRESHOLD = 0.5
EXAMPLE = Path(__file__).with_name("example")  # drawn cells, with their mask and their instances
SIZE_STEPS = 96  # of the slider for the smallest size, up to 32 768 pixels


def add(api: Api) -> None:
    @ui.page("/segment")
    async def segment(run: str = "", model: str = "") -> None:
        async def load_models() -> list[JsonValue]:
            return [one for one in (await api.seen("/api/models"))["models"] if one["kind"] == "segment"]

        async def look() -> None:
            if await load_models():
                ui.navigate.reload()

        with layout.frame("Segment", "/segment"):
            models = await load_models()
            trained = await _trained(api, run) if run else None
            if models or trained:
                return _draw(models, trained, model)
            layout.empty(
                "No segmentation model yet",
                'Add one with "brim models add NAME RUN", where RUN is the folder of a run or a file of weights. '
                "This page then shows it.",
                "Train one on your own images",
                "/jobs/new?kind=segment.train",
            )
            layout.every(2.0, look)
        return None


async def _trained(api: Api, id: str) -> JsonValue:
    """The run that the address names; what cannot be tried is rejected in words."""
    run = await api.get(f"/api/runs/{part(id)}")
    if run["kind"] != "segment.train":
        raise Rejected(409, f'the run "{run["name"]}" is of kind {run["kind"]} and segments no images')
    if run["state"] == "training":
        raise Rejected(409, f'the run "{run["name"]}" is still training; it can be tried when it is done')
    return run


class View(Element, component=Path(__file__).with_name("segment_view.js")):
    """Drop zone, image, polygons and downloads; all in the browser, which calls the API itself."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.add_resource(EXAMPLE)
        self._props |= {"model": model, "threshold": THRESHOLD, "detect-holes": True, "min-area": 0}

    def set(self, name: str, value: object) -> None:
        """Another model, threshold or detect-holes: an image in the page is segmented again; or min-area."""
        self._props[name] = value
        self.update()


def _draw(models: list[JsonValue], trained: JsonValue | None, wanted: str) -> None:
    names: dict[str, str] = {}
    if trained is not None:
        names[trained["id"]] = f"run {trained['name']} · {trained['config']['model']}"
    for one in models:
        names[one["name"]] = " · ".join(filter(None, (one["name"], one["network"], _origin(one))))
    names.setdefault(DEFAULT_MODEL, f"{DEFAULT_MODEL} · {DEFAULT_NETWORK}")
    first = wanted if wanted in names else next(iter(names))
    with layout.card():
        with layout.tools():
            model = ui.select(names, label="Model", value=first).props("outlined dense").classes("brim-field-short")
            with ui.column().classes("brim-slider"):
                label = layout.muted(_above(THRESHOLD))
                threshold = ui.slider(min=0.01, max=0.99, step=0.01, value=THRESHOLD)
                threshold.props('dense label aria-label="Threshold"')
            with ui.column().classes("brim-slider"):
                smallest = layout.muted(_from(0))
                size = ui.slider(min=0, max=SIZE_STEPS, step=1, value=0).props('dense aria-label="Smallest size"')
            holes = ui.switch("Find holes", value=True)
        view = View(first)
    model.on_value_change(lambda event: view.set("model", event.value))
    threshold.on_value_change(lambda event: label.set_text(_above(event.value)))
    threshold.on_value_change(lambda event: view.set("threshold", event.value))
    size.on_value_change(lambda event: smallest.set_text(_from(_area(event.value))))
    size.on_value_change(lambda event: view.set("min-area", _area(event.value)))
    holes.on_value_change(lambda event: view.set("detect-holes", event.value))


def _origin(model: JsonValue) -> str:
    return f"from run {model['run_name']}" if model["run_name"] else ""


def _area(step: float) -> int:
    """Pixels at a step of the slider: from 0, then twice as many every eight steps."""
    return round(8 * 2 ** (step / 8)) if step else 0


def _from(area: int) -> str:
    return f"Smallest size: objects of {area:,} pixels or more" if area else "Smallest size: objects of any size"


def _above(threshold: float) -> str:
    return f"Threshold: pixels above {threshold:.2f} belong to an object"
