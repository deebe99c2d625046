"""Defines the message that asks for every holder.

Pure. An agent is told of the holders that it is known to need. What a restore or an upload does not find there may lie
on others: nothing is absent before all were told of and asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class HoldersWanted:
    """Asks for all holders of `epoch`; those told of do not suffice."""

    SINCE: ClassVar[int] = 3
    epoch: int
