"""A new job: a form for each kind, made from what the API says of it and checked by the API as one types."""

from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import words
from brim.service.dashboard.client import Api, JsonValue, Refused, part
from brim.service.dashboard.form_fields import FormField, field_of, make_config, read_fields
from brim.service.dashboard.job_parts import copy_buttons
from brim.service.dashboard.layout import card, frame, heading, sentence, show_refusal

KINDS: Final = "/api/training/kinds"
JOBS: Final = "/api/training/jobs"
MAX_PAGES = 10  # of datasets or runs to choose among, newest first
WAIT_MS = 300  # after the last key
_HOW: Final = {
    "rf": ("Make a radio dataset first", "/jobs/new?kind=rf.generate"),
    "images": ("Bring images first", "/datasets"),
    "sequences": ("Bring sequences first", "/datasets"),
}


def add(api: Api) -> None:
    @ui.page("/jobs/new", response_timeout=30)
    async def new(kind: str = "", like: str = "", run_id: str = "", dataset_ids: str = "") -> None:
        with frame("New job", "/jobs"):
            try:
                kinds = {one["kind"]: one for one in (await api.seen(KINDS, fresh_s=3600.0))["kinds"]}
                if kind not in kinds:
                    return _draw_kinds(kinds)
                choices = await _choices(api, kinds[kind])
                earlier = await api.get(f"{JOBS}/{part(like)}") if like else None
            except Refused as failure:
                return show_refusal(failure)
            form = JobForm(api, kinds, kind, choices)
            form.begin(earlier, {"run_id": run_id, "dataset_ids": dataset_ids})
        await form.check()
        return None


class JobForm:
    """The fields of one kind, what they hold, and what the API says of it."""

    def __init__(self, api: Api, kinds: dict[str, JsonValue], kind: str, choices: dict[str, dict[str, str]]) -> None:
        """Draw it; choices are datasets and runs by their ids."""
        self._api, self._kind, self._choices = api, kinds[kind], choices
        self._fields = read_fields(kind, self._kind["schema"])
        self._inputs: dict[str, Any] = {}
        self._asked, self._is_touched = 0, False
        with card():
            ui.select(
                {name: one["title"] for name, one in kinds.items()}, label="Kind", value=kind, on_change=_choose_kind
            ).props("outlined dense").classes("brim-field")
            ui.label(self._kind["description"]).classes("brim-muted")
            self._name = ui.input("Name", value=self._kind["title"], on_change=self._changed)
            self._name.props(f"outlined dense stack-label debounce={WAIT_MS} maxlength=200").classes("brim-field")
            self._draw_presets()
            self._draw_missing()
            with ui.element("div").classes("brim-form"):
                for field in self._fields:
                    if field.common:
                        self._inputs[field.path] = self._draw(field)
            self._draw_rest()
            self._draw_end()

    def begin(self, earlier: JsonValue | None, given: dict[str, str]) -> None:
        """Fill in what to begin with: an earlier job's values, or the newest of what it needs; and the ids given."""
        for field in self._fields:
            found = None if earlier is None else _at(earlier["config"], field.path)
            if found is not None and found != field.default:
                self._inputs[field.path].set_value(field.filled(found))
            elif earlier is None and field.required and (ids := list(self._choices.get(field.path, {}))):
                id = given[field.path] if given.get(field.path) in ids else ids[0]
                self._inputs[field.path].set_value([id] if field.sort == "datasets" and not field.is_one else id)
        if earlier is not None:
            self._name.set_value(earlier["name"])
        self._is_touched = False

    def body(self) -> JsonValue:
        """What would be submitted."""
        values = {path: one.value for path, one in self._inputs.items()}
        for field in self._fields:
            if field.sort == "datasets" and not isinstance(values[field.path], list):
                values[field.path] = [values[field.path]] if values[field.path] else []
        return {
            "kind": self._kind["kind"],
            "name": (self._name.value or "").strip(),
            "config": make_config(self._fields, values),
        }

    async def check(self) -> None:
        """Ask the API whether it could be submitted as it is, and show what it says where it belongs."""
        self._asked += 1
        asked = self._asked
        try:
            told = await self._api.post(f"{JOBS}/validate", self.body())
        except Refused as failure:
            if asked == self._asked:
                self._refuse(failure)
            return
        if asked == self._asked:  # else it was changed meanwhile, and is asked again
            self._accept(f"Takes about {words.in_bytes(told['estimated_bytes'])} of disk.")

    # Drawing

    def _draw_presets(self) -> None:
        presets: dict[str, JsonValue] = self._kind["presets"]
        if presets:
            with ui.row(align_items="center"):
                ui.label("Presets").classes("brim-muted")
                for name, values in {**presets, "defaults": {}}.items():
                    ui.button(name, on_click=lambda values=values: self._fill(values)).props("outline dense no-caps")

    def _draw_missing(self) -> None:
        if self._kind["reads"] and not self._choices.get("dataset_ids"):
            with ui.row(align_items="center").classes("brim-error"):
                ui.label(f"There is no dataset of {self._kind['reads']} yet.")
                ui.link(*_HOW[self._kind["reads"]])
        needs_run = any(field.sort == "run" and field.required for field in self._fields)
        if needs_run and not self._choices.get("run_id"):
            with ui.row(align_items="center").classes("brim-error"):
                ui.label("There is no run to use yet.")
                ui.link("Train one first", f"/jobs/new?kind={part(self._kind['reads_run'])}")

    def _draw_rest(self) -> None:
        rest = [field for field in self._fields if not field.common]
        if rest:
            fold = ui.expansion("All settings", icon="tune").classes("brim-fold")
            with fold, ui.element("div").classes("brim-form"):
                for field in rest:
                    self._inputs[field.path] = self._draw(field)

    def _draw_end(self) -> None:
        with ui.row(align_items="center").classes("brim-tools"):
            self._submit = ui.button("Submit", icon="send", on_click=self._send).props("no-caps unelevated")
            self._told = ui.label().classes("brim-told").props('role="status"')
        copy_buttons(self._api.settings, self.body)

    def _draw(self, field: FormField) -> Any:
        if field.sort == "switch":
            with ui.column().classes("brim-field brim-switch"):
                made = ui.switch(field.label, value=field.start, on_change=self._changed).props("dense")
                ui.label(field.help).classes("brim-muted")
            return made
        is_chosen = field.sort in ("choice", "choices", "datasets", "run")
        drawn = self._select(field) if is_chosen else self._typed(field)
        drawn.props["hint"] = f"{field.help} As JSON." if field.sort == "json" else field.help
        return drawn.props("outlined dense stack-label").classes("brim-field")

    def _select(self, field: FormField) -> ui.select:
        many = field.sort == "choices" or (field.sort == "datasets" and not field.is_one)
        start = field.start if many or field.sort != "datasets" else None
        options = self._options(field)
        made = ui.select(options, label=field.label, value=start, multiple=many, on_change=self._changed)
        return made.props("use-chips") if many else made

    def _typed(self, field: FormField) -> ui.input:
        make = ui.textarea if field.sort == "json" else ui.input
        made = make(field.label, value=field.start, placeholder=field.hint, on_change=self._changed)
        made.props(f"debounce={WAIT_MS}")
        return made.props({"number": "inputmode=decimal", "json": "autogrow"}.get(field.sort, ""))

    def _options(self, field: FormField) -> dict[Any, str]:
        known = self._choices.get(field.path)
        listed = {one: _said(one) for one in field.choices} if known is None else dict(known)
        is_empty_allowed = field.sort == "run" or (field.sort == "choice" and (field.nullable or field.default is None))
        return {None: "not set", **listed} if is_empty_allowed and field.sort != "choices" else listed

    # What happens

    async def _changed(self) -> None:
        self._is_touched = True
        await self.check()

    async def _fill(self, values: JsonValue) -> None:
        """A preset: its fields as it says, the others as they are by default; what it does not know of stays."""
        known = {name for preset in self._kind["presets"].values() for name in preset}
        for field in self._fields:
            if field.path in known:
                value = values.get(field.path)
                self._inputs[field.path].set_value(field.start if value is None else field.filled(value))
        await self.check()

    async def _send(self) -> None:
        self._submit.disable()
        try:
            job = await self._api.post(JOBS, self.body())
        except Refused as failure:
            self._is_touched = True
            return self._refuse(failure)
        return ui.navigate.to(f"/jobs/{part(job['id'])}")

    def _accept(self, text: str) -> None:
        self._clear()
        self._submit.enable()
        self._told.set_text(text)
        self._told.classes(remove="brim-bad")

    def _refuse(self, failure: Refused) -> None:
        self._clear()
        self._submit.set_enabled(failure.status in (429, 503))  # as it is it may do later
        self._told.set_text(sentence(failure.detail))
        self._told.classes(add="brim-bad")
        place = field_of(failure.field, [*self._inputs, "name"])
        shown: Any = self._name if place == "name" else self._inputs.get(place or "")
        if self._is_touched and hasattr(shown, "error"):  # a switch has no place for it
            shown.error = sentence(failure.detail)

    def _clear(self) -> None:
        for one in (self._name, *self._inputs.values()):
            if getattr(one, "error", None):
                one.error = None


def _choose_kind(event: Any) -> None:
    ui.navigate.to(f"/jobs/new?kind={part(event.value)}")


def _draw_kinds(kinds: dict[str, JsonValue]) -> None:
    """All that a job can be, to choose from."""
    with ui.element("div").classes("brim-grid"):
        for name, one in kinds.items():
            with ui.link(target=f"/jobs/new?kind={part(name)}").classes("brim-plain brim-choice"):
                heading(one["title"])
                ui.label(one["description"]).classes("brim-muted")


async def _choices(api: Api, kind: JsonValue) -> dict[str, dict[str, str]]:
    """Datasets and runs that the fields of a kind may name, newest first."""
    names = kind["schema"]["properties"]
    found: dict[str, dict[str, str]] = {}
    if "dataset_ids" in names:
        rows = await _all(api, "/api/datasets", "datasets", kind=kind["reads"])
        found["dataset_ids"] = {one["id"]: f"{one['name']} · {words.number(one['items'])}" for one in rows}
    if "run_id" in names:
        rows = await _all(api, "/api/runs", "runs")
        wanted = kind["reads_run"] or kind["kind"]
        runs = {one["id"]: f"{one['name']} · {one['id'][:8]}" for one in rows if one["kind"] == wanted}
        found["run_id"] = runs
    return found


async def _all(api: Api, path: str, name: str, **query: Any) -> list[JsonValue]:
    rows: list[JsonValue] = []
    for page in range(1, MAX_PAGES + 1):
        found = await api.get(path, page=page, **query)
        rows += found[name]
        if page >= found["pages"]:
            break
    return rows


def _at(config: JsonValue, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _said(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
