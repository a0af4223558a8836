"""Now: what the devices do, where the waiting goes, and the jobs that run."""

from typing import Any

from nicegui import ui

from brim.service.dashboard import charts, words
from brim.service.dashboard.client import Api, JsonValue, Refused
from brim.service.dashboard.job_parts import WAITING, ProgressBar, StatusLabel
from brim.service.dashboard.layout import card, empty, every, figure, frame, heading, show_refusal

HISTORY_S = 600
FRESH_S = 10  # asked for each second: some more than is new, for a second that was missed
_LINES = {"busy": "busy_share", "of the ceiling": "ceiling_share", "memory": "memory_bytes", "power": "power_w"}


def add(api: Api) -> None:
    @ui.page("/", response_timeout=30)
    async def now() -> None:
        charts.allow_push()
        with frame("Now", "/"):
            devices, jobs = DeviceCards(), RunningJobs()

        async def look(seconds: int = FRESH_S) -> None:
            try:
                devices.show(await api.seen("/api/devices/history", seconds=seconds))
            except Refused as failure:
                devices.refuse(failure)
            await jobs.look(api)

        try:
            await look(HISTORY_S)
        except Refused as failure:
            show_refusal(failure)
        every(1.0, look)


class DeviceCards:
    """A card for each device, kept while the device is there."""

    def __init__(self) -> None:
        self._place = ui.column().classes("brim-stack")
        self._cards: dict[tuple[str, str], DeviceCard] = {}
        self._told = ""

    def show(self, history: JsonValue) -> None:
        """New samples of the devices; those that came or went make the cards again."""
        found = {(one["worker"], one["name"]): one for one in history["devices"]}
        if self._told or found.keys() != self._cards.keys() or not found:
            self._rebuild(found)
        for key, one in found.items():
            self._cards[key].show(one)

    def refuse(self, failure: Refused) -> None:
        """Say what the API refused, once."""
        if self._told != failure.detail:
            self._told, self._cards = failure.detail, {}
            self._place.clear()
            with self._place:
                show_refusal(failure)

    def _rebuild(self, found: dict[tuple[str, str], JsonValue]) -> None:
        if not found and self._told == "none":
            return
        self._told, self._cards = "" if found else "none", {}
        self._place.clear()
        with self._place:
            if not found:
                text = "A worker says what it runs on when it has started; that takes some seconds."
                empty("No device yet", text)
            self._cards = {key: DeviceCard(one) for key, one in found.items()}


class DeviceCard:
    """One device: figures of this second, the last ten minutes, and where the waiting goes."""

    def __init__(self, device: JsonValue) -> None:
        """Draw what is known so far."""
        self._last_s, self._stalls = 0.0, dict[str, float]()
        self._total = device["memory_total_bytes"]
        has_power = device["kind"] == "gpu" or any(sample["power_w"] is not None for sample in device["samples"])
        self._names = [name for name in _LINES if name != "power" or has_power]
        with card(device["name"]):
            with ui.row().classes("brim-figures"):
                self._busy = figure("busy", words.NONE)
                self._ceiling = figure("of the ceiling", words.NONE)
                self._memory = figure(
                    f"of {words.in_bytes(self._total)} memory" if self._total else "memory", words.NONE
                )
                self._power = figure("power", words.NONE)
                figure("worker", device["worker"])
            with ui.element("div").classes("brim-split"):
                self._chart = charts.draw(self._options(device["samples"]), "The last ten minutes of this device")
                with ui.column().classes("brim-stack"):
                    heading("Where the waiting goes")
                    self._idle = ui.label().classes("brim-muted")
                    self._bars = charts.draw(charts.bars({}, is_share=True), "Share of the time waited, by cause")

    def show(self, device: JsonValue) -> None:
        """Figures of the newest sample; the chart gets what it has not."""
        fresh = [sample for sample in device["samples"] if sample["at"] > self._last_s]
        if fresh:
            newest = fresh[-1]
            self._busy.set_text(words.share(newest["busy_share"]))
            self._ceiling.set_text(words.share(newest["ceiling_share"]))
            self._memory.set_text(words.in_bytes(newest["memory_bytes"]))
            self._power.set_text(words.watts(newest["power_w"]))
            if self._last_s:
                since = charts.in_ms(newest["at"] - HISTORY_S)
                charts.push(self._chart, self._points(fresh), since=since)
            self._last_s = newest["at"]
        self._show_stalls(device["stalls"], device["job_id"])

    def _show_stalls(self, stalls: dict[str, float], job_id: str | None) -> None:
        waited = f"{words.share(sum(stalls.values()))} of the time waits for something."
        self._idle.set_text(waited if stalls else "It is not known yet." if job_id else "No job runs here.")
        self._bars.set_visibility(bool(stalls))
        if stalls != self._stalls:
            self._stalls = stalls
            ordered = dict(sorted(stalls.items(), key=lambda one: -one[1]))
            self._bars.style(f"height: {44 + 32 * len(stalls)}px")
            self._bars.options.clear()
            self._bars.options.update(charts.bars(ordered, is_share=True))
            self._bars.update()

    def _options(self, samples: list[JsonValue]) -> dict[str, Any]:
        series = dict(zip(self._names, self._points(samples), strict=True))
        return charts.lines(series, is_time=True, is_share=True, right={"power": "W"} if "power" in series else None)

    def _points(self, samples: list[JsonValue]) -> list[list[list[float | None]]]:
        return [[[charts.in_ms(sample["at"]), self._value(sample, name)] for sample in samples] for name in self._names]

    def _value(self, sample: JsonValue, name: str) -> float | None:
        value = sample[_LINES[name]]
        if name == "memory":
            return round(value / self._total, 4) if self._total and value is not None else None
        return None if value is None else round(value, 4)


class RunningJobs:
    """What runs, with progress, and how many wait."""

    def __init__(self) -> None:
        with card("Jobs"):
            with ui.row().classes("brim-figures"):
                self._counts = {name: figure(name, words.NONE) for name in ("running", "waiting", "failed", "in all")}
            self._place = ui.column().classes("brim-stack")
            with ui.column().classes("brim-stack") as self._nothing:
                empty(
                    "Nothing has run yet",
                    "Begin with a small dataset of simulated transmissions; all else is made from one.",
                    action="Generate radio samples",
                    target="/jobs/new?kind=rf.generate",
                )
            with ui.row():
                ui.link("All jobs", "/jobs")
                ui.link("New job", "/jobs/new")
        self._nothing.set_visibility(False)
        self._rows: dict[str, RunningJob] = {}

    async def look(self, api: Api) -> None:
        """Ask for what runs now."""
        counts = {status: await _total(api, status) for status in (*WAITING, "failed", "")}
        running = await api.seen("/api/training/jobs", status="running")
        self._counts["running"].set_text(words.number(running["total"]))
        self._counts["waiting"].set_text(words.number(sum(counts[status] for status in WAITING)))
        self._counts["failed"].set_text(words.number(counts["failed"]))
        self._counts["in all"].set_text(words.number(counts[""]))
        self._nothing.set_visibility(counts[""] == 0)
        self._show(running["jobs"])

    def _show(self, jobs: list[JsonValue]) -> None:
        for id in self._rows.keys() - {job["id"] for job in jobs}:
            self._rows.pop(id).row.delete()
        with self._place:
            for job in jobs:
                if job["id"] not in self._rows:
                    self._rows[job["id"]] = RunningJob(job)
                self._rows[job["id"]].progress.show(job)


class RunningJob:
    """A running job in a row."""

    def __init__(self, job: JsonValue) -> None:
        """Its name, a link, and its bar."""
        with ui.column().classes("brim-row") as self.row:
            with ui.row(align_items="center"):
                ui.link(job["name"], f"/jobs/{job['id']}")
                ui.label(job["kind"]).classes("brim-muted")
                StatusLabel(job["status"])
            self.progress = ProgressBar()


async def _total(api: Api, status: str) -> int:
    return int((await api.seen("/api/training/jobs", status=status))["total"])
