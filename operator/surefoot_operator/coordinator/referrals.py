"""Says where agents of a job are to go.

Made by the composition root. Without it an agent whose job is led by another replica asks the same one for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit


def _only_shard(_: str) -> int:
    return 0


def _nowhere(_: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Referrals:
    """Knows a job's shard, and where its agents connect."""

    shard_of: Callable[[str], int] = _only_shard
    url_of: Callable[[int], str] = _nowhere
    """Empty: wherever they are."""

    def elsewhere(self, shard: int, host: str | None) -> str:
        """Returns where an agent is to go; empty: it is right here.

        `host`: by which name it called this server.
        """
        url = self.url_of(shard)
        return url if url and urlsplit(url).hostname != host else ""
