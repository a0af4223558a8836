"""How far is the solver from the Cramér-Rao bound, by the quality of the clocks?

Samples are drawn without IQ, the power is known to both. Seeds are fixed.
"""

import argparse
import sys

import torch

from brim.rf import preset
from brim.rf.generation.drawn import draw_accepted
from brim.rf.location.evaluate import baselines, metrics
from brim.rf.location.solver import calibrate, target
from page import table

CLOCKS_US = (0.0, 0.1, 0.3, 1.0, 10.0)


def main() -> None:
    """Print a row for each clock in `production`, and one for `city`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=1_000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = [("production", us, "geman_mcclure") for us in CLOCKS_US] + [("city", 0.1, "mixture")]
    rows = []
    for name, us, answer in cases:
        rows.append(measure(name, us, answer, options.samples))
        print(*rows[-1], file=sys.stderr, flush=True)
    header = ("scenario", "clock, µs", "median bound, m", "median error, m", "median / median", "rms / rms")
    print(table("The solver and the bound", header, rows))


def measure(name: str, clock_us: float, answer: str, samples: int) -> list[str]:
    """A row of the table; the noise of arrivals is calibrated on other samples."""
    config = preset(name, seed=1, clock_sigma_s=clock_us * 1e-6)
    noise = calibrate(draw_accepted(config, samples), config, power_known=True)
    rows = draw_accepted(preset(name, seed=2, clock_sigma_s=clock_us * 1e-6), samples)
    found = baselines(rows, config, noise, power_known=True)[answer]
    said = metrics(found, target(rows, found.origin, config), rows["crlb_m"])
    bound = float(rows["crlb_m"].double().quantile(0.5))
    ratios = [f"{said[key]:.2f}" for key in ("crlb_ratio_median", "crlb_ratio_trimmed")]
    return [name, f"{clock_us:g}", f"{bound:.0f}", f"{said['median_error_m']:.0f}", *ratios]


if __name__ == "__main__":
    main()
