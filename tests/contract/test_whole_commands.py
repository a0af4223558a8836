"""Small runs of every command in one process of their own: what they import, and what their reports account for."""

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

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


def pictures(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for part in ("images", "masks"):
        (folder / part).mkdir()
    for number in range(4):
        mask = np.zeros((64, 64), np.uint8)
        cv2.circle(mask, (32, 20 + 8 * number), 9, 255, -1)
        image = np.clip(rng.normal(60, 9, (64, 64, 3)) + mask[..., None] / 2, 0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / f"images/{number}.png"), image)
        cv2.imwrite(str(folder / f"masks/{number}.png"), mask)


def sequences(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(24):
        place = folder / "features" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        np.save(place / f"{number}.npy", rng.normal(size=(20, 4)).astype(np.float32))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    path = tmp_path_factory.mktemp("commands")
    pictures(path)
    sequences(path)
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
