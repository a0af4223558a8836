"""Now: what the devices do, what they wait for, and the running jobs."""

from contextlib import suppress
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import charts, layout, words
from brim.service.dashboard.client import Api, JsonValue, Rejected, part
from brim.service.dashboard.dataset import UNITS
from brim.service.dashboard.job import JOBS, draw_progress
from brim.service.dashboard.run import RUN_KINDS, series
from brim.service.dashboard.runs import quality

HISTORY_S = 600
SHOWN = 6  # of the newest datasets and runs
FRESH_S = 10  # asked for each second: more than is new, in case a second was missed
_LINES: Final = {"busy": "busy_share", "of the ceiling": "ceiling_share", "memory": "memory_bytes", "power": "power_w"}


def add(api: Api) -> None:
    @ui.page("/", response_timeout=30)
    async def now() -> None:
        charts.allow_push()
        with layout.frame("Now", "/"):
            devices, jobs, made = Devices(), RunningJobs(), MadeLast()
            await devices.look(api, HISTORY_S)
            await jobs.look(api)
        ui.timer(0, lambda: made.look(api), once=True)  # after the first paint: pictures are read from the files
        layout.every(10.0, lambda: made.look(api))
        layout.every(1.0, lambda: devices.look(api, FRESH_S))
        layout.every(1.0, lambda: jobs.look(api))


class Devices(layout.Live):
    """A card for each device; all are drawn again when a device comes or goes."""

    async def look(self, api: Api, seconds: int) -> None:
        async with self.rejections():
            history = await api.seen("/api/devices/history", seconds=seconds)
            devices = {(one["worker"], one["name"]): one for one in history["devices"]}
            self.show(list(devices), lambda _: self._draw(devices))
            for key, one in devices.items():
                self._cards[key].show(one)

    def _draw(self, devices: dict[tuple[str, str], JsonValue]) -> None:
        self._cards = {key: DeviceCard(one) for key, one in devices.items()}
        if not devices:
            layout.empty("No device yet", "A worker reports its device some seconds after it started.")


class DeviceCard:
    """One device: figures of this second, the last ten minutes, and what it waits for."""

    def __init__(self, device: JsonValue) -> None:
        self._last_s, self._worker, self._total = 0.0, device["worker"], device["memory_total_bytes"]
        has_power = device["kind"] == "gpu" or any(sample["power_w"] is not None for sample in device["samples"])
        self._names = [name for name in _LINES if name != "power" or has_power]
        series = dict(zip(self._names, self._points(device["samples"]), strict=True))
        options = charts.lines(series, is_time=True, is_share=True, right=("power", "W") if has_power else None)
        with layout.card(device["name"]):
            self._figures = layout.Live()
            with ui.element("div").classes("brim-split"):
                self._chart = charts.draw(options, "The last ten minutes of this device")
                self._stalls = layout.Live()

    def show(self, device: JsonValue) -> None:
        """Figures of the newest sample; the chart gets the new points."""
        fresh = [sample for sample in device["samples"] if sample["at"] > self._last_s]
        if fresh:
            newest = fresh[-1]
            power_w, memory = newest["power_w"], words.in_bytes(self._total)
            values = {
                "busy with a job" if device["kind"] == "cpu" else "busy": words.share(newest["busy_share"]),
                "of the ceiling": words.share(newest["ceiling_share"]),
                f"of {memory} memory" if self._total else "memory": words.in_bytes(newest["memory_bytes"]),
                "power": words.NONE if power_w is None else f"{power_w:.0f} W",
                "worker": self._worker,
            }
            values = {name: value for name, value in values.items() if value != words.NONE}
            self._figures.show(values, layout.figures)
            if self._last_s:
                charts.push(self._chart, self._points(fresh), since=charts.in_ms(newest["at"] - HISTORY_S))
            self._last_s = newest["at"]
        self._stalls.show((device["stalls"], device["job_id"] is not None), _draw_stalls)

    def _points(self, samples: list[JsonValue]) -> list[list[charts.Point]]:
        return [[(charts.in_ms(sample["at"]), self._value(sample, name)) for sample in samples] for name in self._names]

    def _value(self, sample: JsonValue, name: str) -> float | None:
        value = sample[_LINES[name]]
        if name == "memory" and value is not None:
            value = value / self._total if self._total else None
        return None if value is None else round(value, 4)


def _draw_stalls(state: tuple[dict[str, float], bool]) -> None:
    stalls, has_job = state
    layout.heading("Waiting time")
    if not stalls:
        layout.muted("Not known yet." if has_job else "No job runs here.")
        return
    layout.muted(f"{words.share(sum(stalls.values()))} of the time is spent waiting.")
    options = charts.bars(dict(sorted(stalls.items(), key=lambda one: -one[1])), is_share=True)
    charts.draw(options, "Share of the time waited, by cause").style(f"height: {44 + 32 * len(stalls)}px")


class RunningJobs:
    """The running jobs with their progress, and the counts of all."""

    def __init__(self) -> None:
        with layout.card("Jobs"):
            self._counts, self._rows = layout.Live(), layout.Live()
            with ui.row():
                ui.link("All jobs", "/jobs")
                ui.link("New job", "/jobs/new")
        self._progress: dict[str, layout.Live] = {}

    async def look(self, api: Api) -> None:
        lists: dict[str, Any] = {}
        for status in ("running", "pending", "queued", "failed", ""):
            lists[status] = await api.seen(JOBS, status=status)
        total = {status: one["total"] for status, one in lists.items()}
        counts = {
            "running": total["running"],
            "waiting": total["pending"] + total["queued"],
            "failed": total["failed"],
            "in all": total[""],
        }
        self._counts.show({name: words.number(count) for name, count in counts.items()}, layout.figures)
        jobs = {job["id"]: job for job in lists["running"]["jobs"]}
        self._rows.show(list(jobs), lambda _: self._draw_rows(jobs))
        for id, job in jobs.items():
            self._progress[id].show(job, draw_progress)

    def _draw_rows(self, jobs: dict[str, JsonValue]) -> None:
        self._progress = {}
        for id, job in jobs.items():
            with ui.column().classes("brim-row"):
                with ui.row(align_items="center"):
                    ui.link(job["name"], f"/jobs/{part(id)}")
                    layout.muted(words.kind(job["kind"]))
                self._progress[id] = layout.Live()


class MadeLast:
    """The newest datasets and runs, a picture of each; what to do first where there are none."""

    def __init__(self) -> None:
        self._is_drawn = False
        with layout.card("Made last"):
            self._parts = layout.Live()

    async def look(self, api: Api) -> None:
        async with self._parts.rejections():
            datasets = (await api.seen("/api/datasets", fresh_s=5.0))["datasets"]
            runs = (await api.seen("/api/runs", fresh_s=5.0, per_page=SHOWN, brief=True))["runs"]
            things = [("datasets", one) for one in datasets] + [("runs", one) for one in runs]
            newest = sorted(things, key=lambda thing: thing[1]["created_at"], reverse=True)[:SHOWN]
            if not self._is_drawn:
                self._is_drawn = True
                self._parts.show((newest, {}), _draw_made)  # at once; pictures follow
            pictures = {one["id"]: await _picture(api, sort, one) for sort, one in newest}
            self._parts.show((newest, pictures), _draw_made)


async def _picture(api: Api, sort: str, one: JsonValue) -> JsonValue:
    """What a picture is drawn from: points of a curve, a histogram, or nothing."""
    with suppress(Rejected):
        if sort == "runs":
            lines = (await api.seen(f"/api/runs/{part(one['id'])}/metrics", fresh_s=30.0, points=60))["lines"]
            return series(lines, "val_loss") or series(lines, "loss")
        if one["kind"] in ("rf", "sequences") and one["items"]:
            statistics = await api.seen(f"/api/datasets/{part(one['id'])}/statistics", fresh_s=60.0)
            return statistics["histograms"].get("crlb_m") or statistics["histograms"].get("frames")
    return None


def _draw_made(made: tuple[list[tuple[str, JsonValue]], dict[str, JsonValue]]) -> None:
    newest, pictures = made
    if not newest:
        text = "Begin with a small dataset of simulated transmissions: training and evaluation need one."
        return layout.empty("Nothing has run yet", text, "Generate radio samples", "/jobs/new?kind=rf.generate")
    with ui.element("div").classes("brim-made"):
        for sort, one in newest:
            with ui.element("div").classes("brim-made-one"):
                _draw_picture(sort, one, pictures.get(one["id"]))
                ui.link(one["name"], f"/{sort}/{part(one['id'])}")
                if sort == "runs":
                    text = f"{RUN_KINDS.get(one['kind'], one['kind'])} · {quality(one['quality'])}"
                else:
                    text = f"{words.number(one['items'])} {UNITS[one['kind']]}"
                layout.muted(f"{text} · {words.ago(one['created_at'])}")
    return None


def _draw_picture(sort: str, one: JsonValue, picture: JsonValue) -> None:
    if sort == "datasets" and one["kind"] == "images" and one["items"]:
        image = ui.element("img").props(
            f'alt="The first image" loading="lazy" src="/api/datasets/{part(one["id"])}/images/0"'
        )
        image.props('width="160" height="120"')
    elif sort == "runs" and picture:
        charts.draw(_bare(charts.lines({"loss": picture})), f"Loss of {one['name']}")
    elif picture and picture["counts"]:
        charts.draw(
            _bare(charts.histogram(picture["edges"], picture["counts"], x_name="")), f"Figures of {one['name']}"
        )


def _bare(options: JsonValue) -> JsonValue:
    """A chart as small as a stamp: the curve alone."""
    for axis in ("xAxis", "yAxis"):
        for one in options[axis] if isinstance(options[axis], list) else [options[axis]]:
            one |= {"show": False}
    return {**options, "grid": {"left": 4, "right": 4, "top": 6, "bottom": 6}, "legend": {"show": False}}
