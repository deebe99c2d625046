"""What holds for every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from gate.nightly_rows import is_left_to_the_night

# A machine under load is no finding, and continuous integration tries the same cases each time; at a desk they vary.
settings.register_profile("desk", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=15)
settings.register_profile("gate", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("gate" if os.environ.get("CI") == "true" else "desk")

_ROOT = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the rows of matrices that tests/gate/nightly_rows.py leaves to the nightly run."""
    for item in items:
        if is_left_to_the_night(str(item.path.relative_to(_ROOT)), item.nodeid.partition("::")[2]):
            item.add_marker(pytest.mark.nightly)
