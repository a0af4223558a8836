"""How accurately does the locator place transmitters, against answers that need no training, and how soon?

Each scenario: a network trained on samples made in memory (`rf train --stream`), tested on a dataset with IQ and
another seed. Time is that of training from an empty directory, generation included. With several seeds the figures are
mean ± standard deviation over trainings. Seeds are fixed throughout.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from brim.engine.device import resolve_device
from brim.rf import generate, preset
from brim.rf.config import GenerateConfig, LocatorTraining
from brim.rf.location import LocatorEvaluation, Streamed, evaluate_run, train, write_evaluation
from page import machine, table, tell

STREAM_SEED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is trained on, what is tested on, and what is asked for."""

    trained: GenerateConfig
    tested: GenerateConfig
    hybrid: bool = True
    power: Literal["unknown", "known"] = "unknown"
    ratios: tuple[tuple[str, float], ...] = ()  # median error over that of a baseline; "best" is the best of them
    metres: float | None = None
    points: float  # that coverage may be off


def scenarios() -> dict[str, Scenario]:
    """The bars by name."""
    city, valley, amateur, production = (preset(name) for name in ("city", "valley", "amateur", "production"))
    elsewhere = replace(city, use_random_receivers=True)
    law = (("arrival_strength", 0.75), ("mixture", 1.03))
    maps = (("strength", 0.5), ("fingerprint", 1.0))
    return {
        "city": Scenario(trained=city, tested=city, ratios=law, points=4),
        "valley": Scenario(trained=valley, tested=valley, power="known", ratios=maps, points=4),
        "amateur": Scenario(trained=amateur, tested=amateur, ratios=(("best", 0.8),), points=4),
        "production": Scenario(trained=production, tested=production, ratios=(("best", 1.0),), points=3),
        "pure": Scenario(trained=production, tested=production, hybrid=False, metres=1_500.0, points=5),
        "unseen": Scenario(trained=elsewhere, tested=city, ratios=(("arrival_strength", 0.85),), points=5),
    }


def main() -> None:
    """Train, test, print a table and one JSON line."""
    options = parse_options()
    device, known = resolve_device(options.device), scenarios()
    results: dict[str, Any] = {"question": "accuracy of the locator", "machine": machine(device, options.commit)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.scenarios:
            results[name] = [measure(name, known[name], seed, Path(folder), options) for seed in range(options.seeds)]
            rows += lines(name, known[name], results[name])
    text = render(results, rows)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    print(text)
    print(json.dumps(results))


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scenarios", nargs="+", choices=[*scenarios()], default=[*scenarios()])
    parser.add_argument("--train", type=int, default=300_000, help="samples to train on")
    parser.add_argument("--test", type=int, default=5_000, help="samples to test on")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=1_024)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each scenario")
    parser.add_argument("--feature-level", action="store_true", help="train on samples without IQ")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--report", type=Path, help="folder of HTML pages with error distributions and calibration")
    return parser.parse_args()


def measure(name: str, scenario: Scenario, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One training and its test."""
    data, run = folder / f"{name}-test", folder / f"{name}-{seed}"
    if not data.exists():
        tell(f"{name}: generating {options.test} samples to test on")
        generate(replace(scenario.tested, seed=1_000), data, options.test, device=options.device)
    tell(f"{name}: training with seed {seed}")
    trained = scenario.trained
    trained = replace(trained, seed=STREAM_SEED + seed, environment_seed=scenario.tested.environment_seed or 0)
    streamed = Streamed(generation=trained, samples=options.train, drawn=options.feature_level)
    config = LocatorTraining(
        epochs=options.epochs, batch_size=options.batch_size, learning_rate=options.learning_rate, seed=seed,
        hybrid=scenario.hybrid, power=scenario.power,
    )  # fmt: skip
    began_s = time.perf_counter()
    report = train([], run, config, stream=streamed, device=options.device)
    seconds = time.perf_counter() - began_s
    found = evaluate_run(run, data, device=options.device)
    if options.report and seed == 0:
        write_page(name, found, options.report)
    return {"seconds": seconds, "train": report.as_dict() | {"run": name}, "evaluate": found.metrics}


def write_page(name: str, found: LocatorEvaluation, folder: Path) -> None:
    """The evaluation report, with plots."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{name}.html"
    write_evaluation(name, "held-out samples", found.metrics, found.rows, found.estimate, found.baselines, page)


def lines(name: str, scenario: Scenario, trained: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of the table: what was asked for, and what was measured."""
    tests = [one["evaluate"] for one in trained]
    medians = [test["median_error_m"] for test in tests]
    out = [[name, "median error, m", "" if scenario.metres is None else f"≤ {scenario.metres:g}", spread(medians)]]
    for baseline, most in scenario.ratios:
        ratios = []
        for test, median in zip(tests, medians, strict=True):
            chosen = test["best_baseline"] if baseline == "best" else baseline
            ratios.append(median / test["baselines"][chosen]["median_error_m"])
        label = f"{baseline}: {tests[0]['best_baseline']}" if baseline == "best" else baseline
        out.append([name, f"over that of {label}", f"≤ {most:g}", spread(ratios)])
    shares = "/".join(spread([100 * test["coverage"][level] for test in tests]) for level in ("50", "90", "95"))
    out.append([name, "inside 50/90/95 %", f"± {scenario.points:g}", shares])
    out.append([name, "training, s", "", spread([one["seconds"] for one in trained])])
    return out


def spread(values: list[float]) -> str:
    """The value, or mean ± standard deviation of several."""
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{statistics.mean(values):.4g} ± {statistics.stdev(values):.2g}"


def render(results: dict[str, Any], rows: list[list[str]]) -> str:
    """The results page."""
    where, about = results["machine"], (__doc__ or "").splitlines()
    text = [
        f"# {about[0]}",
        "",
        *about[2:],
        "",
        f"- machine: {where['device']}, versions {where['versions']}, commit {where['commit']}, {where['date']}",
        f"- command: `python benchmarks/bench_locate.py {' '.join(public_arguments())}`",
        "",
        table("Bars", ["scenario", "figure", "asked", "measured"], rows),
        "",
    ]
    return "\n".join(text)


def public_arguments() -> list[str]:
    """The command line without paths."""
    return [word for word in sys.argv[1:] if "/" not in word and word not in ("--markdown", "--report")]


if __name__ == "__main__":
    main()
