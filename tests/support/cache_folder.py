"""Where tests keep what is slow to get or to build, from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Ours in the user's cache folder; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surefoot"
