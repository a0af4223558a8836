"""Small runs of every command in one process of their own: what they import, and what their reports account for."""

import json
import subprocess
import sys

import pytest

from brim.segmentation.scenes import write_cells
from brim.sequences.corpus.synthetic import make_sequences

FOR_NOTHING = ["torch._dynamo", "torch._inductor", "sympy", "triton", "pandas", "sklearn", "matplotlib", "scipy.stats"]
SCRIPT = f"""
import io, itertools, json, sys
from contextlib import redirect_stdout
from brim.cli import main
from brim.engine.meter import Account
for argv in json.loads(sys.argv[1]):
    readings, out = itertools.count(), io.StringIO()
    Account.__init__.__kwdefaults__["clock"] = readings.__next__  # a second passes with each reading
    with redirect_stdout(out):
        code = main(argv)
    loaded = [name for name in {FOR_NOTHING!r} if name in sys.modules]
    answer = json.loads(out.getvalue().splitlines()[-1])
    print(json.dumps([argv[:2], code, loaded, next(readings), answer]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    path = tmp_path_factory.mktemp("commands")
    write_cells(path / "images", path / "masks", 4, seed=1, height=64, width=64)
    make_sequences(path / "features", 24, dim=4, classes=2, mean_length=20)
    lines = [
        "rf generate --out data --samples 24 --device cpu",
        "rf train data --out locator --epochs 1 --batch-size 8 --device cpu",
        "rf evaluate locator data --device cpu",
        "segment train --images images --masks masks --model unet_tiny --out net --epochs 1 --size 32 --device cpu",
        "segment predict images --model unet_tiny --weights net --out polygons --batch-size 1 --device cpu",
        "segment tune --models unet_tiny --size 64 --seconds 0.5 --out sizes.json --device cpu",
        "sequence pack features --out corpus",
        "sequence train corpus --out run --mode supervised --model cnn_lstm --classifier-epochs 1 --device cpu",
        "sequence evaluate run corpus --device cpu",
    ]
    argv = json.dumps([[*line.split(), "--json"] for line in lines])
    done = subprocess.run([sys.executable, "-c", SCRIPT, argv], cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_nothing_is_imported_for_nothing(answers):
    assert [(name, code, loaded) for name, code, loaded, *_ in answers if code or loaded] == []


def test_every_report_accounts_for_the_seconds_of_its_command(answers):
    for name, _, _, seconds, report in answers:
        assert report["wall_s"] == seconds - 1, name  # all but those before the first reading
        assert report["work_s"] + sum(report["overhead"].values()) == pytest.approx(report["wall_s"], abs=2e-3), name
        assert report["work_s"] > 0, name
        assert report["startup_s"] == report["overhead"]["import"] + report["overhead"].get("device", 0), name
