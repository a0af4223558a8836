"""Generate a small dataset for your own stations, read it back, and compare arrival differences with the truth.

python examples/radio_generate.py [DIR]     about ten seconds on two CPU cores; a second run continues the dataset
"""

import sys

from brim import Dataset
from brim.rf import GenerateConfig, Station, generate

STATIONS = (
    Station("Hill", 45.10, 7.40, 480.0),
    Station("Tower", 45.02, 7.95, 210.0),
    Station("Ridge", 44.78, 7.30, 620.0),
    Station("Field", 44.80, 7.85, 240.0),
)


def main(out: str) -> None:
    """Generate into `out` and print the errors of the measured arrival differences by SNR."""
    config = GenerateConfig(stations=STATIONS, tx_power_dbm=37.0, seed=3)
    report = generate(config, out, 60)
    print(f"{report.accepted} of {report.attempted} attempts accepted, in {report.dataset}")

    data = Dataset(out)
    rows = data.load(["features", "truth", "present", "reference"])
    feature = {column["name"]: k for k, column in enumerate(data.manifest["features"])}
    truth = {column["name"]: k for k, column in enumerate(data.manifest["truth"])}

    others = rows["present"].clone()  # the reference's own difference is 0 by definition
    others[range(len(data)), rows["reference"]] = False
    measured = rows["features"][others][:, feature["arrival_difference_us"], 0]  # 0: the mean over the chunks
    error_us = measured - rows["truth"][others][:, truth["arrival_difference_us"]]
    snr_db = rows["truth"][others][:, truth["snr_record_db"]]
    for low, high in ((5, 10), (10, 20), (20, 30), (30, 99)):
        part = error_us[(snr_db >= low) & (snr_db < high)]
        if len(part):
            print(f"SNR {low}-{high} dB: {len(part)} records, rms error {part.square().mean().sqrt():.2f} µs")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "radio-example")
