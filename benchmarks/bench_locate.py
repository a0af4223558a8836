"""How accurately does the locator place transmitters, against the classical baselines and the Cramér-Rao bound?

Training data: the production preset, seed 1. Held out: the same preset with another seed. The hybrid starts from the
solver's answer; the pure network has nothing but features and station positions. Seeds are fixed throughout.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from brim.engine.device import resolve_device
from brim.rf import generate, preset
from brim.rf.config import LocatorTraining
from brim.rf.location import train
from brim.rf.location.page import write_evaluation
from brim.rf.location.run import LocatorEvaluation, evaluate_run
from page import machine, table, tell

COLUMNS = ("median_error_m", "mean_error_m", "p95_error_m", "crlb_ratio", "crlb_ratio_trimmed", "crlb_ratio_median")
NOMINAL = {"50": 0.50, "90": 0.90, "95": 0.95}


def main() -> None:
    """Generate, train both models, evaluate on held-out data, print a table and one JSON line."""
    options = parse_options()
    device = resolve_device(options.device)
    results: dict[str, Any] = {"question": "accuracy of the locator", "machine": machine(device, options.commit)}
    with tempfile.TemporaryDirectory() as folder:
        data = {name: Path(folder) / name for name in ("train", "test")}
        for (name, path), seed in zip(data.items(), (1, 2), strict=True):
            tell(f"generating {options.samples[name]} samples for {name}")
            generate(preset("production", seed=seed), path, options.samples[name], device=options.device)
        for name, hybrid in (("hybrid", True), ("pure", False)):
            tell(f"training the {name} model")
            config = LocatorTraining(epochs=options.epochs, hybrid=hybrid, learning_rate=options.learning_rate)
            report = train([data["train"]], Path(folder) / name, config, device=options.device)
            found = evaluate_run(Path(folder) / name, data["test"], device=options.device)
            results[name] = {"train": report.as_dict() | {"run": name}, "evaluate": found.metrics}
            if hybrid and options.report:
                write_page(found, options.report)
    results["bars"] = bars(results)
    text = render(results, options)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    print(text)
    print(json.dumps(results))


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--train", type=int, default=20_000, help="training samples")
    parser.add_argument("--test", type=int, default=5_000, help="held-out samples")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--report", type=Path, help="HTML page with the plots of the hybrid")
    options = parser.parse_args()
    options.samples = {"train": options.train, "test": options.test}
    return options


def write_page(found: LocatorEvaluation, path: Path) -> None:
    """The evaluation report, with plots."""
    write_evaluation("hybrid", "production, seed 2", found.metrics, found.rows, found.estimate, found.baselines, path)


def bars(results: dict[str, Any]) -> dict[str, Any]:
    """What was asked for, and what was measured."""
    hybrid = results["hybrid"]["evaluate"]
    best = min(entry["median_error_m"] for entry in hybrid["baselines"].values())
    off = {name: hybrid["coverage"][name] - share for name, share in NOMINAL.items()}
    return {
        "median_over_best_baseline": hybrid["median_error_m"] / best,
        "crlb_ratio": hybrid["crlb_ratio"],
        "worst_coverage_gap": max(off.values(), key=abs),
    }


def render(results: dict[str, Any], options: argparse.Namespace) -> str:
    """The results page."""
    entries = {"hybrid": results["hybrid"]["evaluate"], "pure network": results["pure"]["evaluate"]}
    entries |= {f"baseline {name}": entry for name, entry in results["hybrid"]["evaluate"]["baselines"].items()}
    rows = []
    for name, entry in entries.items():
        numbers = [f"{entry[column]:.3f}" if "ratio" in column else f"{entry[column]:.0f}" for column in COLUMNS]
        shares = "/".join(f"{100 * entry['coverage'][level]:.1f}" for level in NOMINAL)
        rows.append([name, *numbers, shares])
    measured, where = results["bars"], results["machine"]
    asked = [
        ["median error over the best baseline's", "≤ 1.02", f"{measured['median_over_best_baseline']:.3f}"],
        ["crlb_ratio", "≤ 1.5, aim 1.15", f"{measured['crlb_ratio']:.3f}"],
        ["coverage off nominal, at worst", "within 5 points", f"{100 * measured['worst_coverage_gap']:+.1f} points"],
    ]
    header = [
        "",
        "median m",
        "mean m",
        "95 % m",
        "crlb_ratio",
        "without worst 1 %",
        "median/median",
        "coverage 50/90/95",
    ]
    lines = [
        f"# {__doc__.splitlines()[0] if __doc__ else ''}",
        "",
        *(__doc__ or "").splitlines()[2:],
        "",
        f"- machine: {where['device']}, versions {where['versions']}, commit {where['commit']}, {where['date']}",
        f"- data: {options.train} samples to train on, {options.test} held out; {options.epochs} epochs",
        f"- command: `python benchmarks/bench_locate.py {' '.join(public_arguments())}`",
        "",
        table("Bars", ["bar", "asked", "measured"], asked),
        "",
        table("Held-out data", header, rows),
        "",
    ]
    return "\n".join(lines)


def public_arguments() -> list[str]:
    """The command line without paths."""
    return [word for word in sys.argv[1:] if "/" not in word and word not in ("--markdown", "--report")]


if __name__ == "__main__":
    main()
