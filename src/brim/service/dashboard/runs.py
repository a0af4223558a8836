"""Runs side by side: all of them with their quality, tags and notes, and several with their curves and settings."""

import json
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import charts, layout, words
from brim.service.dashboard.client import Api, JsonValue, Rejected, part
from brim.service.dashboard.form_fields import FormField
from brim.service.dashboard.run import POINTS, RUN_KINDS, series

LISTED = 1000
COMPARED = 8  # runs whose curves can still be told apart
CURVES: Final = {
    "val_loss": "Held-out loss", "loss": "Loss", "val_median_error_m": "Held-out median error, m", "ap50": "AP 0.5",
    "dice": "Dice", "val_accuracy": "Held-out accuracy",
}  # fmt: skip
_LINK: Final = """<q-td :props="props"><a class="brim-row-link brim-row-link-own" :href="'/runs/' + props.row.id">{{
props.row.name }}</a><div class="brim-narrow brim-muted">{{ props.row.narrow }}</div></q-td>"""
# Quasar's own, with a name for screen readers
_CHECKBOX: Final = """<q-checkbox :model-value="props.selected" :aria-label="%s"
@update:model-value="(value, event) => Object.getOwnPropertyDescriptor(props, 'selected').set(value, event)" />"""
_TAGS: Final = """<q-td :props="props"><span v-for="tag in props.row.tags" :key="tag" class="brim-tag">{{ tag }}</span>
<span class="brim-muted">{{ props.row.notes }}</span></q-td>"""
_WIDE: Final = {"classes": "brim-wide", "headerClasses": "brim-wide"}


def add(api: Api) -> None:
    @ui.page("/runs", response_timeout=30)
    async def runs(kind: str = "", name: str = "") -> None:
        with layout.frame("Runs", "/runs"):
            view = RunList(api, kind if kind in RUN_KINDS else "", name[:200])
            await view.look()
        layout.every(2.0, view.look)

    @ui.page("/runs/compare", response_timeout=30)
    async def compare(ids: str = "") -> None:
        with layout.frame("Compare runs", "/runs"):
            chosen = list(dict.fromkeys(filter(None, ids.split(","))))[:COMPARED]
            if len(chosen) < 2:
                return layout.empty("Choose at least two runs", "Tick them in the list.", "All runs", "/runs")
            listed = [await api.get(f"/api/runs/{part(id)}") for id in chosen]
            lines = [(await api.get(f"/api/runs/{part(id)}/metrics", points=POINTS))["lines"] for id in chosen]
            datasets = {id for run in listed for id in (run["config"] or {}).get("dataset_ids", [])}
            _draw_compared(listed, lines, {id: await _name(api, id) for id in sorted(datasets)})
        return None


class RunList:
    """A table that sorts by any column; ticked rows can be compared."""

    def __init__(self, api: Api, kind: str, name: str) -> None:
        self._api, self._wanted = api, {"kind": kind, "name": name}
        with layout.tools():
            kinds = {"": "any", **RUN_KINDS}
            self._kind = ui.select(kinds, label="Kind", value=kind, on_change=self._filter)
            self._name = ui.input("Name or tag", value=name, on_change=self._filter).props("debounce=300 clearable")
            for field in (self._kind, self._name):
                field.props("outlined dense").classes("brim-field-short")
            ui.space()
            self._compare = ui.button("Compare", icon="compare_arrows", on_click=self._open).props("no-caps outline")
            ui.button("Train", icon="add", on_click=lambda: ui.navigate.to("/jobs/new")).props("no-caps unelevated")
        self._notice = layout.Live()
        self._table = ui.table(
            rows=[], columns=_columns(), row_key="id", selection="multiple", on_select=self._ticked, pagination=50
        )
        self._table.classes("brim-table brim-jobs").props('flat bordered aria-label="Runs"')
        self._table.add_slot("header-selection", _CHECKBOX % "'All runs'")
        self._table.add_slot("body-selection", _CHECKBOX % "props.row.name")
        self._table.add_slot("body-cell-name", _LINK)
        self._table.add_slot("body-cell-tags", _TAGS)
        self._ticked()

    async def look(self) -> None:
        async with self._notice.rejections():
            kind = self._wanted["kind"]
            answer = await self._api.seen("/api/runs", fresh_s=1.5, per_page=LISTED, brief=True, kind=kind)
            rows = [_row(one) for one in answer["runs"] if _matches(one, self._wanted["name"])]
            if rows != self._table.rows:
                self._table.rows = rows
            self._table.set_visibility(bool(rows))
            hint = ("No runs yet", "Training on any dataset makes a run.", "Train something", "/jobs/new")
            if kind or self._wanted["name"]:
                hint = ("No runs match", "Change the filters, or go back to the whole list.", "Show all runs", "/runs")
            self._notice.show(() if rows else hint, lambda hint: layout.empty(*hint) if hint else None)

    async def _filter(self) -> None:
        self._wanted = {"kind": self._kind.value or "", "name": self._name.value or ""}
        query = "&".join(f"{name}={part(value)}" for name, value in self._wanted.items() if value)
        ui.navigate.history.replace(f"/runs?{query}" if query else "/runs")
        await self.look()

    def _ticked(self) -> None:
        count = len(self._table.selected)
        self._compare.set_enabled(2 <= count <= COMPARED)
        self._compare.set_text(f"Compare {count}" if count else "Compare")

    def _open(self) -> None:
        ui.navigate.to(f"/runs/compare?ids={','.join(row['id'] for row in self._table.selected)}")


def _columns() -> list[JsonValue]:
    plain: dict[str, Any] = {"align": "left", "sortable": True}
    by_value = "(a, b, one, other) => (one.value ?? Infinity) - (other.value ?? Infinity)"
    by_time = "(a, b, one, other) => one.at < other.at ? -1 : 1"
    return [
        {"name": "name", "label": "Name", "field": "name", **plain},
        {"name": "kind", "label": "Kind", "field": "kind", **plain, **_WIDE},
        {"name": "quality", "label": "Quality", "field": "quality", ":sort": by_value, **plain, **_WIDE},
        {"name": "state", "label": "State", "field": "state", **plain, **_WIDE},
        {"name": "tags", "label": "Tags and notes", "field": "tags", "align": "left", **_WIDE},
        {"name": "created", "label": "Made", "field": "created", ":sort": by_time, **plain, **_WIDE},
    ]


def quality(value: JsonValue | None) -> str:
    """The figure by which a run is judged, in words."""
    if value is None:
        return words.NONE
    if value["smaller_is_better"]:
        return f"median {words.metres(value['value'])}"
    names = {"ap50": "AP 0.5", "dice": "Dice", "accuracy": "accuracy", "ccc": "CCC"}
    shown = words.share(value["value"]) if value["name"] == "accuracy" else f"{value['value']:.3f}"
    return f"{names[value['name']]} {shown}"


def _row(run: JsonValue) -> JsonValue:
    judged, kind = run["quality"], RUN_KINDS.get(run["kind"], run["kind"])
    text = quality(judged)
    return {
        "id": run["id"],
        "name": run["name"],
        "kind": kind,
        "quality": text,
        "value": None if judged is None else judged["value"] * (1 if judged["smaller_is_better"] else -1),
        "state": run["state"],
        "tags": run["tags"],
        "notes": run["notes"].partition("\n")[0][:80],
        "created": words.ago(run["created_at"]),
        "at": run["created_at"],
        "narrow": f"{kind} · {run['state']} · {text}",
    }


def _matches(run: JsonValue, text: str) -> bool:
    return not text or any(text.lower() in one.lower() for one in (run["name"], *run["tags"]))


# Several runs


async def _name(api: Api, dataset: str) -> str:
    try:
        return str((await api.seen(f"/api/datasets/{part(dataset)}", fresh_s=30.0))["name"])
    except Rejected:
        return f"{dataset[:8]}, deleted"


def _draw_compared(runs: list[JsonValue], lines: list[list[JsonValue]], datasets: dict[str, str]) -> None:
    labels = _labels(runs)
    with layout.card("Quality"):
        links = [layout.Link(label, f"/runs/{part(run['id'])}") for label, run in zip(labels, runs, strict=True)]
        rows = [(link, quality(run["quality"]), run["notes"]) for link, run in zip(links, runs, strict=True)]
        layout.draw_table("Quality of the runs", ("Run", "Quality", "Notes"), rows)
    with ui.element("div").classes("brim-grid"):
        for name, title in CURVES.items():
            named = {label: points for label, own in zip(labels, lines, strict=True) if (points := series(own, name))}
            if named:
                with layout.card(title):
                    options = charts.lines(named, x_name="step")
                    options["legend"]["show"] = True  # a single line could be of any of them
                    charts.draw(options, f"{title} of the runs")
    with layout.card("Settings that differ"):
        configs = [dict(run["config"] or {}) for run in runs]
        for config in configs:
            config["dataset_ids"] = [datasets[id] for id in config.get("dataset_ids", [])]
        table = differing(configs)
        if len({run["kind"] for run in runs}) > 1:
            layout.muted("These runs are of different kinds: only settings that all of them have are compared.")
            shared = set.intersection(*(set(_flat(config)) for config in configs))
            table = {name: values for name, values in table.items() if name in shared}
        if not table:
            layout.muted("All settings are the same.")
        settings = [(FormField(path=name, sort="text").label, *values) for name, values in table.items()]
        layout.draw_table("Settings that differ", ("Setting", *labels), settings)


def differing(configs: list[JsonValue]) -> dict[str, list[str]]:
    """Settings that are not the same everywhere, by dotted name, as texts."""
    flat = [_flat(config) for config in configs]
    names = dict.fromkeys(name for one in flat for name in one)
    values = {name: [_text(one.get(name)) for one in flat] for name in names}
    return {name: row for name, row in values.items() if len(set(row)) > 1}


def _flat(config: JsonValue, path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{path}{name}.")
        else:
            flat[f"{path}{name}"] = value
    return flat


def _text(value: Any) -> str:
    if isinstance(value, list):
        plain = all(isinstance(one, str | int | float) for one in value)
        return (", ".join(map(words.number, value)) or words.NONE) if plain else json.dumps(value, ensure_ascii=False)
    return words.number(value)


def _labels(runs: list[JsonValue]) -> list[str]:
    """Names, told apart by the id where two are the same."""
    names = [run["name"] for run in runs]
    return [
        f"{name} · {run['id'][:6]}" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)
    ]
