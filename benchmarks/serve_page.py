"""The tables of bench_serve.py: bars, all servers side by side, each server's curve."""

import statistics

from page import Json, number, table

OTHERS = ("litserve", "mosec", "ray")
ABOVE = 1.2  # loads from here on are compared with 1.15 times the best of the others
BAR_HEADER = ["what", "found", "bar", "met"]
CURVE_HEADER = [
    "load", "offered/s", "goodput/s", "sent", "answered", "late", "late > 10 %", "refused", "errors", "p50 ms",
    "p99 ms", "refused p99 ms", "sent late p99 ms", "client CPU",
]  # fmt: skip


def render(results: Json) -> str:
    """Tables of what was measured."""
    if "direct" not in results:
        return "nothing was measured"
    parts = [bars_table(results), compared_table(results)]
    parts += [curve_table(results, name) for name, found in results["servers"].items() if "loads" in found]
    parts += [f"{name} failed: {words}\n" for name, words in results["failures"].items()]
    return "\n\n".join(parts)


def in_words(results: Json) -> str:
    """What was measured with, for the page."""
    if "direct" not in results:
        return ""
    direct, others = results["direct"], results.get("others", {})
    lines = [
        f"{results['network']} at {results['size']}², {direct['setting']}, tuned batch {direct['batch_size']}; "
        f"{results['images']} files of {direct['image_bytes'] / 1000:.0f} kB, answers of "
        f"{direct['answer_bytes'] / 1000:.0f} kB GeoJSON, {statistics.mean(direct['polygons']):.0f} polygons; "
        f"direct call {direct['direct_ms']['median']:.1f} ms, limit {1000 * results['limit_s']:.0f} ms, "
        f"predict_batch {results['capacity_per_s']:.1f} images/s, {results['seconds']:g} s for each load."
    ]
    if "direct_end" in results:
        end = results["direct_end"]
        lines[0] += (
            f" At the end: direct call {end['direct_ms']['median']:.1f} ms, "
            f"predict_batch {statistics.median(end['offline_per_s']):.1f} images/s."
        )
    lines += [
        f"- {name}: batches of up to {told['batch_size']}, {told['wait_ms']:g} ms for one to fill, gives up after "
        f"{1000 * told['timeout_s']:.0f} ms, {told['capacity']} in its queue at most; threads or processes: "
        f"{told['threads']} decode, {told['threads']} trace, {told['api_servers']} take requests"
        for name, told in others.items()
    ]
    lines += [
        f"- {name}, answers in time a second at 2 × by the number of requests held at most: "
        + ", ".join(f"{held}: {rate:.1f}" for held, rate in found["tried"].items())
        for name, found in results.get("tuned", {}).items()
        if "tried" in found
    ]
    return "\n".join(lines)


def bars_table(results: Json) -> str:
    """What was promised, and what was found."""
    servers, capacity = results["servers"], results["capacity_per_s"]
    brim = servers.get("brim", {})
    rows: list[list[str]] = []
    if "idle_ms" in brim:
        bar_ms = 1.1 * results["direct"]["direct_ms"]["median"] + 3
        rows.append(row("idle latency, ms: 1.1 × direct + 3", brim["idle_ms"], bar_ms, below=True))
    if not brim.get("loads"):
        return table("Bars", BAR_HEADER, rows)
    peak = peak_of(brim)
    rows.append(row("peak goodput / predict_batch", peak / capacity, 0.9))
    others = {name: found for name, found in servers.items() if name != "brim" and found.get("loads")}
    if others:
        rows.append(row("peak goodput / best peak of the others", peak / max(map(peak_of, others.values())), 1.0))
    for load, run in brim["loads"].items():
        rivals = [found["loads"][load]["goodput_per_s"] for found in others.values() if load in found["loads"]]
        if float(load) >= ABOVE and rivals:
            ratio = run["goodput_per_s"] / max([*rivals, 1e-9])
            rows.append(row(f"goodput at {load} × / best of the others", ratio, 1.15))
    last = max(brim["loads"], key=float)
    if float(last) >= 3:
        rows.append(row(f"goodput at {last} × / peak", brim["loads"][last]["goodput_per_s"] / peak, 0.9))
    late = sum(run["late_by_a_tenth"] for run in brim["loads"].values())
    rows.append(row("accepted and late by more than a tenth of the limit", late, 0, below=True))
    lag = max(run["lag_p99_ms"] or 0.0 for run in brim["loads"].values()) / (1000 * results["limit_s"])
    rows.append(row("the clients themselves: p99 of sending late / limit", lag, 0.1, below=True))
    return table("Bars", BAR_HEADER, rows)


def row(what: str, found: float, bar: float, *, below: bool = False) -> list[str]:
    """One bar."""
    met = found <= bar if below else found >= bar
    shown = "> 1 000" if found > 1000 else number(found)
    return [what, shown, f"{'≤' if below else '≥'} {number(bar)}", "yes" if met else "NO"]


def peak_of(found: Json) -> float:
    """The most that came in time at any load."""
    return float(max(run["goodput_per_s"] for run in found["loads"].values()))


def compared_table(results: Json) -> str:
    """Goodput of all servers side by side."""
    servers = {name: found for name, found in results["servers"].items() if found.get("loads")}
    loads = sorted({load for found in servers.values() for load in found["loads"]}, key=float)
    rows = [["idle ms", *(number(found["idle_ms"]) for found in servers.values())]]
    for load in loads:
        runs = [found["loads"].get(load) for found in servers.values()]
        rows.append([f"{load} ×", *(number(run["goodput_per_s"]) if run else "–" for run in runs)])
    title = f"Goodput, answers within {1000 * results['limit_s']:.0f} ms per second; capacity "
    return table(title + number(results["capacity_per_s"]), ["offered", *servers], rows)


def curve_table(results: Json, name: str) -> str:
    """One server's whole curve."""
    rows = []
    for load, run in results["servers"][name]["loads"].items():
        times = [run[key] for key in ("p50_ms", "p99_ms", "refused_p99_ms", "lag_p99_ms")]
        rows.append(
            [f"{load} ×", number(run["offered_per_s"]), number(run["goodput_per_s"])]
            + [str(run[key]) for key in ("sent", "answered", "late", "late_by_a_tenth", "refused")]
            + [str(sum(run["errors"].values()))]
            + ["–" if ms is None else f"{ms:.1f}" for ms in times]
            + [f"{run['client_cpu']:.0%}"]
        )
    return table(name, CURVE_HEADER, rows)
