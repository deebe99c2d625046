"""Defines the messages by which two agents try their nodes together.

Pure values, among those of `messages`. The coordinator asks the host of the store first, and its partner once it knows where the
store is: neither agent has to find a free port, or the other one, by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, slots=True)
class PairTrial:
    """Requests an all-reduce with the agent on node `partner` and a PairResult.

    `store`: host:port of the partner's store; empty: this agent hosts it and says where.
    """

    SINCE: ClassVar[int] = 3
    request: int
    partner: str
    store: str = ""


@dataclass(frozen=True, slots=True)
class PairStore:
    """The host:port of the store that a PairTrial wanted."""

    SINCE: ClassVar[int] = 3
    request: int
    address: str


@dataclass(frozen=True, slots=True)
class PairResult:
    """Answers PairTrial.

    unknown: it was not made here, or not to its end, which proves nothing.
    """

    SINCE: ClassVar[int] = 3
    request: int
    verdict: Literal["well", "fails", "unknown"]
    text: str = ""
