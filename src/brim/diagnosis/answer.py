"""What a training waits for, from what its probe saw: seconds of a step by cause, the ceiling, and lines to blame."""

import linecache
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

CAUSES = ("data", "copy", "sync", "launch", "gc", "checkpoint", "evaluation", "communication", "compute")
PASSES = ("forward", "backward", "optimizer", "compute")
ALARM = {"launch": 0.35}  # share of the step from which a cause is the limit; launches are part of every step
ALARM_SHARE, ROUGH_SHARE = 0.08, 0.15  # of all others; where the training had to wait for a core too
STARVED = 0.2  # share of the time without a core from which that is so
NEAR = 0.95  # share of the ceiling from which only what the fixed batch shares with the script can be the limit
SLOWER = 1.1  # than the passes of the script: those of the fixed batch were disturbed
UNEVEN = 0.15  # of the step: ranks that differ by more wait for each other
OFTEN = 0.5  # times a step: a line that reads a value of the device at least so often is there to read it
SHOWN = 0.02  # of the step: smaller causes have no line
NOISE = 3.0  # standard errors between two mean losses that are equal
LOSS_STEPS = 8  # compared at least

ProbeResult = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the script that a cause comes from."""

    cause: str
    file: str
    line: int
    function: str
    share: float  # of the step
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Tried:
    """A change to the script that was measured."""

    change: str
    samples_per_s: float | None
    status: str  # measured, failed or skipped
    loss_changed: bool | None
    note: str = ""


@dataclass(slots=True)
class Diagnosis:
    """What `brim why` prints; the first ten names are those of its JSON."""

    samples_per_s: float | None = None
    ceiling_samples_per_s: float | None = None
    ceiling_share: float | None = None
    limit: str | None = None
    waiting: dict[str, float] = field(default_factory=dict)
    where: list[SourceLine] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    gpu: dict[str, float | None] | None = None
    compute: dict[str, float | None] = field(default_factory=lambda: {"arithmetic": None, "bandwidth": None})
    step_s: float | None = None
    steps: int = 0
    kind: str = ""  # of the steps: optimizer, backward or forward
    loader: dict[str, Any] | None = None
    ranks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timeline: list[list[Any]] = field(default_factory=list)  # cause, start and end in seconds, of one step
    message: str = ""  # why there is no answer, or what else the script did
    exit_code: int = 0
    command: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """An answer that was saved as JSON; names that this version does not know are left out."""
        known = {field.name for field in fields(cls)}
        answer = cls(**{name: value for name, value in values.items() if name in known})
        answer.where = [SourceLine(**place) for place in values["where"]]
        answer.tried = [Tried(**tried) for tried in values["tried"]]
        return answer


def diagnose(results: Sequence[ProbeResult]) -> Diagnosis:
    """The answer from all processes of a run; those of ranks are compared."""
    trainers = [result for result in results if not result["worker"] and measured(result)["num_steps"]]
    trainers.sort(key=lambda result: (result["rank"] is None, result["rank"] or 0))
    if not any((result["world"] or 1) > 1 for result in trainers):
        trainers.sort(key=lambda result: -measured(result)["num_steps"])
        return _of_process(trainers[0], results)
    return _of_ranks(trainers, results)


# One process


def _of_process(result: ProbeResult, results: Sequence[ProbeResult]) -> Diagnosis:
    tally = measured(result)
    num, step_s, samples, parts = window(tally)
    for part, reading in _reading(result).items():
        seconds = reading * parts.get(part, 0.0)
        parts["sync"] = parts.get("sync", 0.0) + seconds
        parts[part] = parts.get(part, 0.0) - seconds
    counted = samples > 0
    ceiling_s, ceiling_samples = ceiling(result, parts, samples / num)
    if not counted:  # neither a loader nor a module's call has shown a batch
        samples, ceiling_samples = num, 1.0
    loader = _loader(result, results)
    if loader is not None:
        loader["wait_s"] = parts.get("data", 0.0) / num
    waiting = _waiting(result, {cause: seconds / num for cause, seconds in parts.items()}, step_s, ceiling_s)
    rate = samples / num / step_s
    best = ceiling_samples / ceiling_s if ceiling_s > 0 else rate
    share, starved = min(1.0, rate / best) if best else None, float(result.get("starved") or 0.0)
    answer = Diagnosis(
        samples_per_s=rate,
        ceiling_samples_per_s=max(best, rate),
        ceiling_share=share,
        limit=limit_of(waiting, share, starved),
        waiting=waiting,
        gpu=_gpu(result, step_s),
        compute=_roof_shares(result, waiting),
        step_s=step_s,
        steps=num,
        kind=result["kind"],
        loader=loader,
        timeline=_timeline(result, step_s),
    )
    if not counted:
        answer.notes.append("the size of its batches was not seen: each step counts as one sample")
    if starved >= STARVED:
        answer.notes.append(
            f"for {starved:.0%} of the time the training thread was ready to run but had no core: other processes, or "
            "workers of its own, held them, and the numbers are rough"
        )
    answer.where = _places(result, results, answer)
    return answer


def measured(result: ProbeResult) -> Mapping[str, Any]:
    """The phase that counts: what was watched, or in a script that ended early what came before."""
    tallies = result["tallies"]
    return tallies["watch"] if tallies["watch"]["num_steps"] >= 2 else tallies["warm"]  # type: ignore[no-any-return]


def window(tally: Mapping[str, Any]) -> tuple[int, float, float, dict[str, float]]:
    """Steps, seconds of one, samples and seconds by cause, of whole epochs where there are two ends of one."""
    steps, epochs = tally["steps"], sorted(set(tally["epochs"]))
    if len(epochs) >= 2 and epochs[-1] - epochs[0] >= 2 and epochs[-1] <= len(steps):
        steps = steps[epochs[0] : epochs[-1]]
    elif len(steps) < tally["num_steps"] or not steps:  # longer than what was kept
        num = max(1, tally["num_steps"])
        return num, sum(tally["seconds"].values()) / num, tally["num_samples"], dict(tally["seconds"])
    parts: Counter[str] = Counter()
    for _, _, causes in steps:
        parts.update(causes)
    return len(steps), sum(s for s, _, _ in steps) / len(steps), sum(n for _, n, _ in steps), dict(parts)


def ceiling(result: ProbeResult, parts: Mapping[str, float], samples: float) -> tuple[float, float]:
    """Seconds and samples of a step on one fixed batch; where that could not be measured, of the passes alone."""
    tally, num = result["tallies"]["ceiling"], window(measured(result))[0]
    seen_s = sum(parts.get(cause, 0.0) for cause in (*PASSES, "communication")) / num
    fixed = any(loader.get("trains") for loader in result.get("loaders", ()))
    if tally["num_steps"] < 2 or not tally["steps"] or not (fixed or _is_cuda(result)):
        return seen_s, samples
    held = tally["num_samples"] / tally["num_steps"]
    if _is_cuda(result):
        return tally["elapsed_s"] / tally["num_steps"], held
    reading = _reading(result)
    passes = sorted(
        sum((1 - reading.get(c, 0.0)) * causes.get(c, 0.0) for c in (*PASSES, "communication"))
        for _, _, causes in tally["steps"]
    )
    cut = len(passes) // 10
    fixed_s = statistics.fmean(passes[cut : len(passes) - cut])
    same = abs(held - samples) < 0.1 * samples
    return (seen_s, samples) if same and fixed_s > SLOWER * seen_s else (fixed_s, held)


def _waiting(result: ProbeResult, parts: Mapping[str, float], step_s: float, ceiling_s: float) -> dict[str, float]:
    """Seconds of a step by cause; they sum to the step."""
    waiting = dict.fromkeys(CAUSES, 0.0)
    for cause in ("copy", "sync", "gc", "checkpoint", "evaluation", "communication"):
        waiting[cause] = parts.get(cause, 0.0)
    waiting["data"] = parts.get("data", 0.0) + parts.get("feed", 0.0)
    waiting["compute"] = sum(parts.get(cause, 0.0) for cause in PASSES)
    logging, past = _between_steps(result)
    waiting["checkpoint"] += logging * (parts.get("after", 0.0) + parts.get("between", 0.0))
    waiting["data"] += (1 - logging - past) * parts.get("between", 0.0)
    waiting["launch"] += (1 - logging) * parts.get("after", 0.0) + past * parts.get("between", 0.0)  # Python
    if _is_cuda(result):
        return _on_gpu(result, waiting, step_s, ceiling_s)
    operations = result.get("operations") or {}
    num = operations.get("num", 0.0) - _reading(result)["compute"] * operations.get("num_between", 0.0)
    launches = min(0.95 * waiting["compute"], num * operations.get("overhead_s", 0.0))
    waiting["launch"] += launches
    waiting["compute"] -= launches
    return waiting


def _on_gpu(result: ProbeResult, host: dict[str, float], step_s: float, ceiling_s: float) -> dict[str, float]:
    """The device's view: kernels are compute; its idle time is attributed to what the host did meanwhile.

    Time in which the host waits for kernels is no loss. What the fixed batch without synchronisation gains on top of
    the other causes is that of synchronising; the idle time that remains even there is that of launches.
    """
    busy = (result.get("operations") or {}).get("device_s") or min(ceiling_s, step_s)
    idle = max(0.0, step_s - busy)
    named = ("data", "copy", "gc", "checkpoint", "evaluation", "communication")
    total = sum(host[cause] for cause in named)
    scale = min(1.0, idle / total) if total else 1.0
    waiting = dict.fromkeys(CAUSES, 0.0) | {cause: host[cause] * scale for cause in named}
    rest = idle - sum(waiting.values())
    waiting["sync"] = min(rest, max(0.0, step_s - sum(waiting.values()) - ceiling_s)) if host["sync"] else 0.0
    waiting["launch"] = rest - waiting["sync"]
    waiting["compute"] = step_s - idle
    return waiting


def limit_of(waiting: Mapping[str, float], ceiling_share: float | None = None, starved: float = 0.0) -> str:
    """The largest cause besides arithmetic that matters, else compute."""
    alarm = ROUGH_SHARE if starved >= STARVED else ALARM_SHARE
    step_s = sum(waiting.values())
    causes = ("launch", "communication") if (ceiling_share or 0.0) >= NEAR else CAUSES[:-1]
    large = {c: s for c in causes if (s := waiting.get(c, 0.0)) >= ALARM.get(c, alarm) * step_s}
    return max(large, key=lambda cause: large[cause]) if large else "compute"


def _is_cuda(result: ProbeResult) -> bool:
    return (result.get("device") or {}).get("type") == "cuda"


def _kinds(result: ProbeResult) -> Counter[tuple[str, bool]]:
    """Samples of the stack, by part of the step and by whether their line is there to read a value of the device.

    What else such a line computes, as in `out[i].argmax().item()`, is for that value. Calls into other libraries, which
    may read one too, do not count.
    """
    tally, kinds = measured(result), Counter[tuple[str, bool]]()
    lines = {tuple(site[2:4]) for site in tally["sites"] if site[0] == "sync" and site[5] >= OFTEN * tally["num_steps"]}
    for part, file, line, _, inner, num in _stacks(result):
        reads = (file, line) in lines and part != "logging" and (not inner or inner.startswith(_OF_TENSORS))
        kinds[part, reads] += num
    return kinds


def _stacks(result: ProbeResult) -> list[Sequence[Any]]:
    """Samples of the stack; between steps those of lines that write are logging, as C functions leave no frame."""
    return [
        ["logging", *entry[1:]]
        if entry[0] in ("after", "past") and not entry[4] and _WRITES.search(linecache.getline(entry[1], entry[2]))
        else entry
        for entry in measured(result)["stacks"]
    ]


def _reading(result: ProbeResult) -> dict[str, float]:
    """Share of each part of the step that belongs to lines which read values, besides the reading itself."""
    kinds, shares = _kinds(result), {}
    for parts, names in ((("after", "between"), _BETWEEN), (("feed",), ("feed",)), (("compute",), ("compute",))):
        reading, other = (sum(kinds[name, reads] for name in names) for reads in (True, False))
        shares.update(dict.fromkeys(parts, reading / max(1, reading + other)))
    return shares


def _between_steps(result: ProbeResult) -> tuple[float, float]:
    """Of the time between steps: shares of logging, and of Python behind the line of the step, that makes no batch."""
    kinds = _kinds(result)
    total = max(1, sum(kinds[name, False] for name in _BETWEEN))
    return kinds["logging", False] / total, kinds["past", False] / total


def _loader(result: ProbeResult, results: Sequence[ProbeResult]) -> dict[str, Any] | None:
    """The loader that feeds the training, with the time of its batches."""
    loaders = [loader for loader in result.get("loaders", ()) if loader.get("trains")]
    if not loaders:
        return None
    loader = dict(max(loaders, key=lambda loader: loader["batches"]))
    workers = [other for other in results if other["worker"] and other["parent"] == result["pid"]]
    fetched = [other["fetch"] for other in (workers if loader["num_workers"] else [result]) if other.get("fetch")]
    batches = sum(entry["batches"] for entry in fetched)
    for name in ("fetch_s", "collate_s"):
        loader[name] = sum(entry[name] for entry in fetched) / batches if batches else None
    return loader


def _gpu(result: ProbeResult, step_s: float) -> dict[str, float | None] | None:
    if not _is_cuda(result):
        return None
    device_s = (result.get("operations") or {}).get("device_s")
    busy = None if device_s is None else min(1.0, device_s / step_s)
    return {"busy": busy, "memory": result.get("memory"), "power": result.get("power")}


def _roof_shares(result: ProbeResult, waiting: Mapping[str, float]) -> dict[str, float | None]:
    operations, seconds = result.get("operations") or {}, waiting["compute"] + waiting["launch"]
    shares: dict[str, float | None] = {}
    for name, amount, roof in (("arithmetic", "flops", "roof_flops"), ("bandwidth", "bytes", "roof_bytes")):
        known = operations.get(amount) is not None and operations.get(roof) and seconds > 0
        shares[name] = min(1.0, operations[amount] / seconds / operations[roof]) if known else None
    return shares


def _timeline(result: ProbeResult, step_s: float) -> list[list[Any]]:
    """The spans of the step whose duration is nearest to the mean."""
    drawn = [spans for spans in result.get("drawn", ()) if spans]
    return min(drawn, key=lambda spans: abs(spans[-1][2] - step_s), default=[])


# Places

_BETWEEN = ("after", "past", "logging")  # between steps
_WRITES = re.compile(r"""\b((dump|f?sync|flush|save\w*|write\w*)\(|open\(.*["'][wax]b?\+?["'])""")
_OF_TENSORS = ("torch.functional.", "torch._tensor.", "torch.nn.functional.")
_STACKS = {"data": ("data", "feed"), "launch": ("past",), "checkpoint": ("logging", "checkpoint"), "compute": PASSES,
           "communication": ("communication", "backward")}  # fmt: skip


def _places(result: ProbeResult, results: Sequence[ProbeResult], answer: Diagnosis) -> list[SourceLine]:
    """The lines that the largest causes come from, the largest first."""
    step_s, places = answer.step_s or 1.0, []
    for cause, seconds in sorted(answer.waiting.items(), key=lambda entry: -entry[1]):
        if seconds < SHOWN * step_s:
            continue
        place = _of_sites(result, cause, answer) or _of_stacks(result, results, cause, answer)
        if place is not None:
            places.append(place)
    return places


def _of_sites(result: ProbeResult, cause: str, answer: Diagnosis) -> SourceLine | None:
    """From calls that were timed one by one."""
    tally = measured(result)
    sites = [site for site in tally["sites"] if site[0] == cause]
    if not sites:
        return None
    _, what, file, line, function, calls, _ = max(sites, key=lambda site: site[-1])
    num = max(1, tally["num_steps"])
    often = calls / num
    every = (
        "every step" if 0.9 <= often <= 1.5 else f"{often:.3g} a step" if often > 0.5 else f"each {1 / often:.0f} steps"
    )
    detail = f".{what}() {every}" if cause in ("sync", "copy") and what != "print" else f"{what} {every}"
    return SourceLine(cause, file, line, function, answer.waiting[cause] / (answer.step_s or 1.0), detail)


def _of_stacks(result: ProbeResult, results: Sequence[ProbeResult], cause: str, answer: Diagnosis) -> SourceLine | None:
    """From samples of the stack; a batch that workers make is blamed on their lines."""
    loader, all_seen = answer.loader, _stacks(result)
    stacks: Counter[tuple[str, int, str, str]] = Counter()
    if cause == "data" and loader and loader["num_workers"]:
        for other in results:
            if other["worker"]:
                for tally in other["tallies"].values():
                    stacks.update({tuple(entry[1:5]): entry[5] for entry in tally["stacks"]})
    between = "data" if not (loader and loader["wait_s"]) else "launch"  # what Python before the forward pass is
    names = _STACKS.get(cause, (cause,)) + (("after",) if cause == between else ())
    seen = [entry for entry in all_seen if entry[0] in names]
    if cause == "launch" and _count(seen) < answer.waiting["launch"] / 2 / (answer.step_s or 1.0) * _count(all_seen):
        seen = [entry for entry in all_seen if entry[0] in PASSES]  # operations of the network, not Python
    if cause == "data":  # batches of an evaluation
        evaluations = {(entry[1], entry[3]) for entry in all_seen if entry[0] == "evaluation"}
        seen = [entry for entry in seen if (entry[1], entry[3]) not in evaluations] or seen
    if not stacks:
        for _, *site, num in seen:
            stacks[tuple(site)] += num
    if not stacks:
        return None
    lines: Counter[tuple[str, int, str]] = Counter()
    for (file, line, function, _), num in stacks.items():
        lines[file, line, function] += num
    (file, line, function), _ = lines.most_common(1)[0]
    inner = Counter({key[3]: num for key, num in stacks.items() if key[:3] == (file, line, function)})
    detail = inner.most_common(1)[0][0]
    return SourceLine(cause, file, line, function, answer.waiting[cause] / (answer.step_s or 1.0), detail)


def _count(stacks: Sequence[Sequence[Any]]) -> int:
    return sum(entry[5] for entry in stacks)


# Ranks


def _of_ranks(trainers: Sequence[ProbeResult], results: Sequence[ProbeResult]) -> Diagnosis:
    """The rank with the longest work of its own, and the time in which the others wait for it.

    Ranks meet in the backward pass: what it takes longer than that of the quickest rank is waiting for the others.
    """
    answers = [_of_process(result, results) for result in trainers]
    backward = [_mean(result, "backward") for result in trainers]
    for answer, seconds in zip(answers, backward, strict=True):
        excess = min(seconds - min(backward), answer.waiting["compute"])
        answer.waiting["communication"] += excess
        answer.waiting["compute"] -= excess
        answer.limit = limit_of(answer.waiting)
    own = [(answer.step_s or 0.0) - answer.waiting["communication"] for answer in answers]
    slowest, quickest = (choose(range(len(answers)), key=lambda rank: own[rank]) for choose in (max, min))
    answer = answers[slowest]
    answer.ranks = [
        {"rank": result["rank"], "step_s": other.step_s, "own_s": seconds, "waiting": other.waiting}
        for result, other, seconds in zip(trainers, answers, own, strict=True)
    ]
    answer.samples_per_s = sum(other.samples_per_s or 0.0 for other in answers)
    answer.ceiling_samples_per_s = sum(other.ceiling_samples_per_s or 0.0 for other in answers)
    if max(own) - min(own) > UNEVEN * (answer.step_s or 0.0):
        before, idle = answer.waiting, answers[quickest].waiting
        cause = max((c for c in CAUSES if c != "communication"), key=lambda c: before[c] - idle[c])
        # the mean over ranks, so that the time the others wait is seen beside what they wait for
        answer.waiting = {c: statistics.fmean(other.waiting[c] for other in answers) for c in CAUSES}
        where = [place for place in answer.where if place.cause != "communication"]
        meets = _of_sites(trainers[quickest], "communication", answer) or _of_stacks(
            trainers[quickest], results, "communication", answer
        )
        where += [meets] if meets else []
        shares = {c: seconds / (answer.step_s or 1.0) for c, seconds in answer.waiting.items()}
        answer.where = sorted((replace(p, share=shares[p.cause]) for p in where), key=lambda place: -place.share)
        answer.limit = "communication"
        answer.notes.append(
            f"rank {trainers[slowest]['rank']} needs {max(own) * 1e3:.3g} ms for its own part of a step, the quickest "
            f"{min(own) * 1e3:.3g} ms: the others wait for it ({cause})"
        )
    share = (answer.samples_per_s or 0.0) / (answer.ceiling_samples_per_s or 1.0)
    answer.ceiling_share = min(1.0, share)
    return answer


def _mean(result: ProbeResult, cause: str) -> float:
    num, _, _, parts = window(measured(result))
    return parts.get(cause, 0.0) / num


# Losses


def loss_changed(before: Sequence[float | None], after: Sequence[float | None]) -> bool | None:
    """Whether the losses of the first steps differ by more than their noise; None if there are too few."""
    a, b = ([value for value in losses if value is not None] for losses in (before, after))
    num = min(len(a), len(b))
    if num < LOSS_STEPS:
        return None
    a, b = a[:num], b[:num]
    if any(value != value for value in b) and not any(value != value for value in a):
        return True
    error = ((statistics.variance(a) + statistics.variance(b)) / num) ** 0.5
    difference = abs(statistics.fmean(a) - statistics.fmean(b))
    return difference > NOISE * error and difference > 0.02 * abs(statistics.fmean(a))
