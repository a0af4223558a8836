"""Real data that may not be copied into the repository: recordings, cells, speech in the folder `shared` beside it."""

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"


def real_files(pattern: str, shared: Path = SHARED) -> list[Path]:
    """Files such as "recordings/*.wav"; without them a test is skipped, or fails in CI where the folder is there."""
    files = sorted(shared.glob(pattern))
    if not files and shared.is_dir() and os.environ.get("CI"):
        pytest.fail(f"no file matches {pattern} in {shared}, which is there; CI must not skip what needs real data")
    if not files:
        pytest.skip(f"no real data: {pattern} in a folder named shared beside the checkout")
    return files
