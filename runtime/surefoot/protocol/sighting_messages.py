"""Defines the messages about holders that the operator does not reach.

Pure. An operator whose password was changed, or that a network policy cuts off, could choose no restore point; agents
that reach the holders seal and read them in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from surefoot.protocol.codec import since
from surefoot.protocol.identities import HolderEndpoint, HolderId


@dataclass(frozen=True, slots=True)
class LookAtHolders:
    """Requests a Sighting of holders, and a HolderReading of each.

    An agent of a former version changes nothing there, and reads for nobody.
    """

    SINCE: ClassVar[int] = 2
    request: int
    holders: tuple[HolderEndpoint, ...]
    epoch: int = since(3, 0)
    """The claimed epoch that they are sealed at before they are read; 0: they are only looked at."""
    layouts: tuple[str, ...] = since(3, ())
    """Digests of the layout records that need not be told."""


@dataclass(frozen=True, slots=True)
class HolderReading:
    """Tells a holder's index, read after it was sealed.

    Precedes the Sighting that answers the same request. Manifests are JSON of `RankManifest`.
    """

    SINCE: ClassVar[int] = 3
    request: int
    holder: HolderId
    manifests: tuple[str, ...] = ()
    layouts: dict[str, str] = field(default_factory=dict)
    """Records by digest, as far as they could be read and were not known."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """Answers LookAtHolders: which holders gave this agent their index.

    In the order of the request, for exactly the instances that it names; `trouble` says why not.
    """

    SINCE: ClassVar[int] = 2
    request: int
    seen: tuple[bool, ...] = ()
    trouble: tuple[str, ...] = ()
