"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# A machine under load is no finding, and continuous integration tries the same cases each time; at a desk they vary.
settings.register_profile("desk", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=15)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "desk")
