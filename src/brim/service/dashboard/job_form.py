"""A new job: a form for each kind, made from the API's schema and checked by the API as one types."""

import base64
from datetime import UTC, datetime
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import layout, words
from brim.service.dashboard.client import Api, JsonValue, Rejected, part
from brim.service.dashboard.form_fields import FormField, field_of, make_config, read_fields
from brim.service.dashboard.job import JOBS, copy_buttons
from brim.service.dashboard.receivers import ReceiverMap
from brim.service.dashboard.segment import EXAMPLE

MAX_PAGES = 10  # of datasets or runs to choose from, newest first
WAIT_MS = 300  # after the last key
_EXAMPLE: Final = {
    "image.webp": "An image, as drawn by brim",
    "mask.png": "Its mask: cells that touch are one",
    "instances.png": "Its instances: each cell is one",
}
_SOURCES: Final = {
    "rf": ("Generate a radio dataset first", "/jobs/new?kind=rf.generate"),
    "images": ("Upload images first", "/datasets"),
    "sequences": ("Upload sequences first", "/datasets"),
    "recordings": ("Upload recordings first", "/datasets"),
}


def add(api: Api) -> None:
    @ui.page("/jobs/new", response_timeout=30)
    async def new(kind: str = "", like: str = "", run_id: str = "", dataset_ids: str = "") -> None:
        with layout.frame("New job", "/jobs"):
            answer = await api.seen("/api/training/kinds", fresh_s=3600.0)
            kinds = {one["kind"]: one for one in answer["kinds"]}
            if kind not in kinds:
                return _draw_kinds(kinds)
            choices = await _choices(api, kinds[kind])
            earlier = await api.get(f"{JOBS}/{part(like)}") if like else None
            form = JobForm(api, kinds, kind, choices, await _trained_on(api, kinds[kind]))
            if earlier is not None:
                form.copy(earlier)
            else:
                form.choose_inputs({"run_id": run_id, "dataset_ids": dataset_ids})
            await form.check()
        return None


class JobForm:
    """The fields of one kind, and below them what the API says of their values."""

    def __init__(
        self,
        api: Api,
        kinds: dict[str, JsonValue],
        kind: str,
        choices: dict[str, dict[str, str]],
        trained_on: dict[str, list[str]],
    ) -> None:
        """Choices are names of datasets and runs by id, for each field that takes one.

        trained_on  by run, the datasets it was trained on: an evaluation must not begin with them
        """
        self._api, self._kind, self._choices, self._trained_on = api, kinds[kind], choices, trained_on
        self._own_name = ""
        self._is_named = False  # by the user; what is typed arrives later than the field's focus
        self._fields = read_fields(kind, self._kind["schema"])
        self._inputs: dict[str, Any] = {}
        self._checks, self._is_touched = 0, False
        self._begun: JsonValue = None  # the request as the form began: changes up to it are not the user's
        titles = {name: one["title"] for name, one in kinds.items()}
        with layout.card():
            select = ui.select(titles, label="Kind", value=kind).props("outlined dense").classes("brim-field")
            select.on_value_change(lambda event: ui.navigate.to(f"/jobs/new?kind={part(event.value)}"))
            layout.muted(self._kind["description"])
            self._name = ui.input("Name", value=self._kind["title"], on_change=self._changed)
            self._name.props(f"outlined dense stack-label debounce={WAIT_MS} maxlength=200").classes("brim-field")
            self._name.on("focus", self._stop_suggesting)
            self._draw_presets()
            self._draw_missing()
            self._draw_fields(common=True)
            if kind.startswith("segment.") and "model" in self._inputs:
                _draw_example()
            for field in self._fields:
                if field.path == "stations":
                    with ui.expansion("Receivers", icon="cell_tower").classes("brim-fold"):
                        drawn = self._inputs[field.path] = self._draw_field(field)
                        ReceiverMap(drawn, field.default)
            if not all(field.common for field in self._fields):
                with ui.expansion("All settings", icon="tune").classes("brim-fold"):
                    self._draw_fields(common=False)
            with layout.tools():
                self._submit = ui.button("Submit", icon="send", on_click=self._send).props("no-caps unelevated")
                self._verdict = ui.label().classes("brim-told").props('role="status"')
            copy_buttons(api.settings, self.body)

    def copy(self, job: JsonValue) -> None:
        """Fill in the values of an earlier job."""
        self._name.value = job["name"]
        for field in self._fields:
            value: Any = job["config"]
            for name in field.path.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None and value != field.default:
                self._inputs[field.path].value = field.filled(value)
        self._begun = self.body()

    def choose_inputs(self, ids: dict[str, str]) -> None:
        """Choose what the kind needs: the datasets or runs with these ids, or else the newest."""
        run = ids.get("run_id") or next(iter(self._choices.get("run_id", ())), "")
        seen = self._trained_on.get(run, []) if "evaluate" in self._kind["kind"] else []
        for field in self._fields:
            known = list(self._choices.get(field.path, ()))
            if field.path == "dataset_ids" and self._kind["kind"] == "rf.evaluate":
                known = [id for id in known if id not in seen]
            if field.required and known:
                id = ids[field.path] if ids.get(field.path) in known else known[0]
                self._inputs[field.path].value = [id] if field.is_many else id
        self._suggest_name()
        self._begun = self.body()

    def _stop_suggesting(self) -> None:
        self._is_named = True

    def _suggest_name(self) -> None:
        """Name a run after its dataset, its network and the time, until the user names it."""
        if (
            self._is_named
            or self._kind["makes"] != "run"
            or (self._name.value or "") not in (self._own_name, self._kind["title"])
        ):
            return
        chosen = self._inputs["dataset_ids"].value if "dataset_ids" in self._inputs else None
        first = chosen[0] if isinstance(chosen, list) and chosen else chosen
        dataset = self._choices.get("dataset_ids", {}).get(first or "", "").rpartition(" · ")[0]
        network = self._inputs["model"].value if "model" in self._inputs else ""
        parts = (dataset, network if isinstance(network, str) else "", datetime.now(UTC).strftime("%d %b %H:%M"))
        self._own_name = " · ".join(filter(None, parts))[:200]
        self._name.value = self._own_name

    def body(self) -> JsonValue:
        """The request that would be sent."""
        config = make_config(self._fields, {path: one.value for path, one in self._inputs.items()})
        return {"kind": self._kind["kind"], "name": (self._name.value or "").strip(), "config": config}

    async def check(self) -> None:
        """Ask the API whether it would accept the job, and show its answer."""
        self._checks += 1
        mine = self._checks
        failure, answer = None, None
        try:
            answer = await self._api.post(f"{JOBS}/validate", self.body())
        except Rejected as refused:
            failure = refused
        if mine == self._checks:  # otherwise a value changed meanwhile, and is being checked
            self._show(failure, answer)

    def _draw_presets(self) -> None:
        presets: dict[str, JsonValue] = self._kind["presets"]
        if presets:
            with ui.row(align_items="center"):
                layout.muted("Presets")
                for name, values in {**presets, "defaults": {}}.items():
                    ui.button(name, on_click=lambda values=values: self._fill(values)).props("outline dense no-caps")

    def _draw_missing(self) -> None:
        missing = []
        if self._kind["reads"] and not self._choices.get("dataset_ids"):
            missing.append((f"There is no dataset of {self._kind['reads']} yet.", *_SOURCES[self._kind["reads"]]))
        needs_run = any(field.sort == "run" and field.required for field in self._fields)
        if needs_run and not self._choices.get("run_id"):
            target = f"/jobs/new?kind={part(self._kind['reads_run'])}"
            missing.append(("There is no run to use yet.", "Train one first", target))
        for text, action, target in missing:
            with ui.row(align_items="center").classes("brim-error"):
                ui.label(text)
                ui.link(action, target)

    def _draw_fields(self, *, common: bool) -> None:
        with ui.element("div").classes("brim-form"):
            for field in self._fields:
                if field.common == common and field.path != "stations":
                    self._inputs[field.path] = self._draw_field(field)

    def _draw_field(self, field: FormField) -> Any:
        if field.sort == "switch":
            with ui.column().classes("brim-field brim-switch"):
                switch = ui.switch(field.label, value=field.start, on_change=self._changed).props("dense")
                layout.muted(field.help)
            return switch
        drawn: Any
        if field.is_typed:
            make = ui.textarea if field.sort == "json" else ui.input
            drawn = make(field.label, value=field.start, placeholder=field.placeholder, on_change=self._changed)
            drawn.props(f"debounce={WAIT_MS}")
            drawn.props({"number": "inputmode=decimal", "json": "autogrow"}.get(field.sort, ""))
        else:
            drawn = ui.select(self._options(field), label=field.label, value=field.start, multiple=field.is_many)
            drawn.props("use-chips" if field.is_many else "").on_value_change(self._changed)
        drawn.props["hint"] = f"{field.help} As JSON." if field.sort == "json" else field.help
        if field.path == "model":
            drawn.props["hint"] = words.network(field.start) or field.help
            drawn.on_value_change(lambda event: drawn.props(f'hint="{words.network(event.value) or field.help}"'))
        return drawn.props("outlined dense stack-label").classes("brim-field")

    def _options(self, field: FormField) -> dict[Any, str]:
        options: dict[Any, str] = {one: words.number(one) for one in field.choices}
        options |= self._choices.get(field.path, {})
        may_be_empty = field.sort == "run" or (field.sort == "choice" and (field.nullable or field.default is None))
        return {None: "not set", **options} if may_be_empty else options

    async def _changed(self) -> None:
        self._is_touched = self._is_touched or self.body() != self._begun
        self._suggest_name()
        await self.check()

    async def _fill(self, values: JsonValue) -> None:
        """Fill in a preset: fields of other presets get their defaults, all other fields stay."""
        known = {name for preset in self._kind["presets"].values() for name in preset}
        for field in self._fields:
            if field.path in known:
                value = values.get(field.path)
                self._inputs[field.path].value = field.start if value is None else field.filled(value)
        await self.check()

    async def _send(self) -> None:
        self._submit.disable()
        try:
            job = await self._api.post(JOBS, self.body())
        except Rejected as failure:
            self._is_touched = True
            return self._show(failure, None)
        return ui.navigate.to(f"/jobs/{part(job['id'])}")

    def _show(self, failure: Rejected | None, answer: JsonValue) -> None:
        """What the API says of the whole, and what it rejects at its field."""
        fields: dict[str, Any] = {"name": self._name, **self._inputs}
        for one in fields.values():
            if getattr(one, "error", None):  # a switch has none
                one.error = None
        self._submit.set_enabled(failure is None or failure.status in (429, 503))  # it may be accepted later
        if failure is None:
            seconds = answer["estimated_seconds"]
            time = "" if seconds is None else f"{words.seconds(seconds)} and "
            self._verdict.set_text(f"Takes about {time}{words.in_bytes(answer['estimated_bytes'])} of disk.")
            self._verdict.classes(remove="brim-bad")
            return
        told = {field_of(name, list(fields)): layout.sentence(text) for name, text in failure.faults.items()}
        labels = {field.path: field.label for field in self._fields}
        missing = [labels[name] for name, text in told.items() if name in labels and text.endswith(" is missing.")]
        first = (
            f"Choose: {', '.join(missing)}." if missing and not self._is_touched else layout.sentence(failure.detail)
        )
        self._verdict.set_text(first)
        if self._is_touched:
            self._verdict.classes(add="brim-bad")
            for name, text in told.items():
                if name and hasattr(fields[name], "error"):
                    fields[name].error = text


def _draw_example() -> None:
    """What goes into a network and what comes out of it, of cells that `make_labels(4, 0, 208, 208)` drew."""
    with ui.element("div").classes("brim-example"):
        for name, caption in _EXAMPLE.items():
            data = base64.b64encode((EXAMPLE / name).read_bytes()).decode()
            with ui.element("figure"):
                image = ui.element("img").props(f'alt="{caption}" width="104" height="104"')
                image.props["src"] = f"data:image/{name.rpartition('.')[2]};base64,{data}"
                with ui.element("figcaption"):
                    layout.muted(caption)


def _draw_kinds(kinds: dict[str, JsonValue]) -> None:
    with ui.element("div").classes("brim-grid"):
        for name, one in kinds.items():
            with ui.link(target=f"/jobs/new?kind={part(name)}").classes("brim-plain brim-choice"):
                layout.heading(one["title"])
                layout.muted(one["description"])


async def _choices(api: Api, kind: JsonValue) -> dict[str, dict[str, str]]:
    """Datasets and runs that the fields of a kind may name, newest first."""
    fields, choices = kind["schema"]["properties"], dict[str, dict[str, str]]()
    if "dataset_ids" in fields:
        datasets = await _all(api, "datasets", kind=kind["reads"])
        choices["dataset_ids"] = {one["id"]: f"{one['name']} · {words.number(one['items'])}" for one in datasets}
    if "run_id" in fields:
        runs, wanted = await _all(api, "runs"), kind["reads_run"] or kind["kind"]
        choices["run_id"] = {one["id"]: f"{one['name']} · {one['id'][:8]}" for one in runs if one["kind"] == wanted}
    return choices


async def _trained_on(api: Api, kind: JsonValue) -> dict[str, list[str]]:
    """By run that a kind may read, the datasets it was trained on."""
    if "run_id" not in kind["schema"]["properties"]:
        return {}
    return {one["id"]: (one["config"] or {}).get("dataset_ids", []) for one in await _all(api, "runs")}


async def _all(api: Api, name: str, **query: Any) -> list[JsonValue]:
    rows: list[JsonValue] = []
    for page in range(1, MAX_PAGES + 1):
        answer = await api.get(f"/api/{name}", page=page, **query)
        rows += answer[name]
        if page >= answer["pages"]:
            break
    return rows
