"""Files of publishers that are not part of the repository: found beside the checkout, or the test is skipped."""

from pathlib import Path

import pytest


def shared_data(name: str) -> Path:
    """Path of ``../shared/data/NAME`` beside the checkout; skip the test where it does not exist."""
    path = Path(__file__).resolve().parents[2] / "shared" / "data" / name
    if not path.exists():
        pytest.skip(f"{name} is not beside the checkout (../shared/data)")
    return path
