"""Schemathesis against the routes of predictions with models behind them: nothing contradicts the document."""

import subprocess
import sys
from pathlib import Path

import torch
from in_process import InProcess
from live_api import TOKEN, make

from brim.segmentation import create_model
from brim.segmentation.networks import save_weights

# A schema cannot say that a file is an image, or that observations have stations: those are refused though they fit it.
# 503 is the right answer to a deadline of a millisecond.
CONFIG = """
[[operations]]
include-tag = "predictions"
exclude-path-regex = "segment$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "401", "403", "404", "413", "415", "422", "5xx"]
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "503"]

# in a form, a list of one value or of none cannot be told from that value or no field
[[operations]]
include-path-regex = "segment$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "401", "403", "404", "413", "415", "422", "5xx"]
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "503"]
checks.negative_data_rejection.expected-statuses = ["200", "4xx", "5xx"]
"""


def test_schemathesis_finds_nothing_where_models_answer(tmp_path: Path):
    weights = tmp_path / "tiny.safetensors"
    torch.manual_seed(0)
    save_weights(create_model("unet_tiny"), weights, {})
    api = make(tmp_path / "data", InProcess())
    api.catalogue.models.put(name="cells", kind="segment", network="unet_tiny", path=str(weights))
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with api:
        document = api.get("/openapi.json").json
        operations = [operation for methods in document["paths"].values() for operation in methods.values()]
        predicting = sum("predictions" in operation["tags"] for operation in operations)
        command = [
            *(sys.executable, "-m", "schemathesis.cli"),
            *("run", f"http://127.0.0.1:{api.port}/openapi.json", "-H", f"Authorization: Bearer {TOKEN}"),
            *(
                "--include-tag",
                "predictions",
                "--no-color",
                "--seed",
                "7",
                "--max-examples",
                "12",
                "--phases",
                "examples,coverage,fuzzing",
            ),
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        text = api.get("/metrics").body.decode()
    api.queue.close()
    api.catalogue.close()

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"{predicting} selected" in done.stdout
    assert 'brim_predict_requests_total{model="cells",status="200"}' in text  # some were images
