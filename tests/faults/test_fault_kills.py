"""Random `kill -9`s of all processes of a service at work: nothing is lost, done twice or different.

`make test-all` does BRIM_KILLS of them on each database; `make soak` does the same for hours.
"""

import os
import random

import pytest
from soak import NONE, Soak

pytestmark = pytest.mark.long

KILLS = int(os.environ.get("BRIM_KILLS", "6"))
SEED = int(os.environ.get("BRIM_KILLS_SEED", "40"))


@pytest.mark.timeout(900 + 60 * KILLS)
def test_kills_lose_nothing_and_do_nothing_twice(database, tmp_path):
    report = Soak(tmp_path, database, random.Random(SEED)).run(KILLS, seconds=60.0 * KILLS)

    assert {name: report[name] for name in NONE} == dict.fromkeys(NONE, 0)
    assert sum(report["kills"].values()) > 0
    assert report["attempts"] > sum(report["jobs"].values()), f"nothing was hit by {report['kills']}"
    assert report["predictions"].get("200", 0) > 0
