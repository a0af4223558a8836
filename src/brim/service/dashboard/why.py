"""Why: shows a saved answer of `brim why`, with its step as a timeline."""

import html
import json
from typing import Any

from nicegui import ui

from brim.diagnosis.answer import Diagnosis
from brim.diagnosis.page import page
from brim.service.dashboard import layout
from brim.service.dashboard.client import Api


def add(api: Api) -> None:
    @ui.page("/why")
    def why() -> None:
        with layout.frame("Why", "/why"):
            with layout.card("What does a training wait for?"):
                ui.label("Run the script under brim, and open what it says:")
                ui.label("brim why --json -- python train.py > why.json").classes("brim-mono")
                view = layout.TextFile("An answer of brim why, saved with --json", ".json,application/json")
            place = ui.column().style("width:100%")

            def show(event: Any) -> None:
                place.clear()
                with place:
                    _draw(str(event.args))

            view.on("text", show)


def _draw(text: str) -> None:
    try:
        drawn = page(Diagnosis.from_dict(json.loads(text)))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):  # whatever a file of the user's may hold
        layout.show_rejection("This file is no answer of brim why; save one with: brim why --json -- python train.py")
        return
    # a document of its own, without scripts
    style = "width:100%;height:1400px;border:0"
    frame = f'<iframe sandbox title="The answer" style="{style}" srcdoc="{html.escape(drawn)}"></iframe>'
    ui.html(frame, sanitize=False).style("width:100%")
