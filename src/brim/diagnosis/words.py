"""An answer in words."""

from pathlib import Path

from brim.diagnosis.answer import SHOWN, Diagnosis, SourceLine, Tried

NAMES = {
    "data": "waiting for data",
    "copy": "copying",
    "sync": "synchronising",
    "launch": "launching operations",
    "gc": "collecting garbage",
    "checkpoint": "writing checkpoints and logs",
    "evaluation": "evaluating",
    "communication": "waiting for other ranks",
    "compute": "computing",
}
ADVICE = {
    "data": "make batches before they are needed: in workers of a DataLoader, or once for all epochs",
    "sync": "keep values on the device, and read them every hundred steps",
    "gc": "call gc.freeze() after start-up, or collect less often; make fewer objects in a step",
    "checkpoint": "write less often, or in a thread",
    "evaluation": "evaluate less often, with a larger batch and with workers of its own",
    "communication": "give each rank equal work",
    "copy": "pin the memory of batches, and copy with non_blocking=True",
    "launch": "use a larger batch or torch.compile: a step has many small operations",
}


def lines(answer: Diagnosis) -> list[str]:
    """The answer as it is printed."""
    if answer.samples_per_s is None:
        return [answer.message, *answer.notes]
    step_s = answer.step_s or 1.0
    rows = [_headline(answer)]
    places = {place.cause: place for place in answer.where}
    for cause, seconds in sorted(answer.waiting.items(), key=lambda entry: -entry[1]):
        if seconds >= SHOWN * step_s:
            rows.append(f"{seconds / step_s:>6.0%}  {NAMES[cause]}{_details(answer, cause, places.get(cause))}")
    rows += _fixes(answer)
    rows += [f"Note: {note}." for note in answer.notes]
    return rows + ([answer.message] if answer.message else [])


def _headline(answer: Diagnosis) -> str:
    share, rate, ceiling = answer.ceiling_share, answer.samples_per_s or 0.0, answer.ceiling_samples_per_s
    things = "samples/s"
    if share is None or ceiling is None:
        return f"{amount(rate)} {things}."
    if share >= 0.95:
        return f"{amount(rate)} {things}: nearly all ({share:.0%}) of the {amount(ceiling)} that the device could do."
    return f"{amount(rate)} {things}. The device could do {amount(ceiling)} on this step: you get {share:.0%}."


def _details(answer: Diagnosis, cause: str, place: SourceLine | None) -> str:
    parts = []
    loader = answer.loader
    if cause == "data" and loader and loader["wait_s"] < answer.waiting["data"] / 2:
        parts.append("batches are prepared in the training loop")
    elif cause == "data" and loader:
        num = loader["num_workers"]
        parts.append(f"DataLoader, {num or 'no'} worker{'' if num == 1 else 's'}")
        if loader.get("fetch_s"):
            slow = "collating" if loader["collate_s"] > loader["fetch_s"] / 2 else "__getitem__"
            parts.append(f"{loader['fetch_s'] * 1e3:.3g} ms a batch, mostly in {slow}")
    if place is None:
        return f": {', '.join(parts)}" if parts else ""
    at = f"{shown_file(place.file)}:{place.line}"
    last = f"{place.detail} ({at})" if place.detail else f"{place.function} ({at})"
    if cause == "data" and parts:
        return f": {', '.join(parts)} → {last}"
    return f": {last}"


def shown_file(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _fixes(answer: Diagnosis) -> list[str]:
    measured = [tried for tried in answer.tried if tried.status == "measured" and tried.samples_per_s]
    better = sorted(
        (tried for tried in measured if (tried.samples_per_s or 0) > 1.03 * (answer.samples_per_s or 0)),
        key=lambda tried: -(tried.samples_per_s or 0.0),
    )
    rows = []
    if better:
        rows.append(f"First fix: {'. Then: '.join(map(_result, better))}.")
    elif answer.limit in ADVICE:
        advice = ADVICE[answer.limit]
        rows.append(f"First fix: {advice}.")
    for tried in answer.tried:
        if tried.status != "measured":
            rows.append(f"{tried.change}: {tried.status}, {tried.note}.")
        elif tried not in better:
            rows.append(f"{tried.change}: no gain, {amount(tried.samples_per_s or 0)} samples/s measured.")
    return rows


def _result(tried: Tried) -> str:
    loss = {True: ", the loss changes", False: ", loss equal within noise", None: ""}[tried.loss_changed]
    return f"{tried.change} → {amount(tried.samples_per_s or 0)} samples/s, measured{loss}"


def amount(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"
