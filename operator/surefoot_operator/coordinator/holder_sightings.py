"""Merges agents' answers about holders that the operator cannot reach.

Pure; part of `pending_requests`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from surefoot.protocol.bounds import MAX_CAUSE_CHARACTERS
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import HolderEndpoint, HolderId
from surefoot.protocol.plain import shorten
from surefoot.protocol.sighting_messages import Sighting
from surefoot_operator.api.status import World
from surefoot_operator.observed_tiers import HolderSeen, SightSeen

Sightings = Mapping[HolderId, SightSeen]


@dataclass(frozen=True, slots=True)
class SightingRequest:
    """A question to one agent about holders."""

    epoch: int
    asked_seconds: float
    holders: tuple[HolderEndpoint, ...]


def asked(sights: Sightings, question: SightingRequest) -> Sightings:
    """Records a question and drops what older epochs saw."""
    found = of_epoch(sights, question.epoch)
    for endpoint in question.holders:
        now = question.asked_seconds
        known = found.get(endpoint.holder, SightSeen(question.epoch, now, now))
        found[endpoint.holder] = replace(known, asked_seconds=now)
    return found


def of_epoch(sights: Sightings, epoch: int) -> dict[HolderId, SightSeen]:
    """Keeps what was seen in this epoch."""
    return {holder: sight for holder, sight in sights.items() if sight.epoch == epoch}


def read(
    sights: Sightings,
    epoch: int,
    holder: HolderId,
    entries: tuple[RankManifest, ...] | None,
    refused: Iterable[str] = (),
) -> Sightings:
    """Records the index that an agent read of a sealed holder; None: it broke a bound as a whole.

    The first reading counts: a later one might lack what went to the persistent tier behind its listing.
    """
    known = sights.get(holder)
    if known is None or known.epoch != epoch or known.entries is not None:
        return sights
    sentences = tuple(shorten(sentence, MAX_CAUSE_CHARACTERS) for sentence in refused)
    return {**sights, holder: replace(known, entries=entries, refused=sentences)}


def refused_of(sights: Sightings, world: World | None) -> tuple[str, ...]:
    """Records that broke a bound, of the readings that this claim uses: a world that runs uses none."""
    if world is None or world.state != "Claimed":
        return ()
    return tuple(sentence for sight in of_epoch(sights, world.epoch).values() for sentence in sight.refused)


def proxied(holders: tuple[HolderSeen, ...], sights: Sightings, world: World | None) -> tuple[HolderSeen, ...]:
    """Puts what agents read into the place of silent holders.

    While a world is claimed, and of exactly the instances that were read for it: what such a holder takes later is not known.
    """
    if world is None or world.state != "Claimed" or not any(s.entries is not None for s in sights.values()):
        return holders
    return tuple(_proxied(holder, sights.get(holder.endpoint.holder), world.epoch) for holder in holders)


def _proxied(holder: HolderSeen, sight: SightSeen | None, epoch: int) -> HolderSeen:
    if holder.state != "Silent" or sight is None or sight.entries is None or sight.epoch != epoch:
        return holder
    return replace(holder, state="Proxied", fence=epoch, read_epoch=epoch, entries=sight.entries)


def answered(sights: Sightings, question: SightingRequest, answer: Sighting, now: float) -> Sightings:
    """Merges an answer: seeing a holder outweighs not seeing it.

    An agent that does not see it may be cut off itself. An answer that does not match its question is ignored.
    """
    if len(answer.seen) != len(question.holders) or len(answer.trouble) != len(question.holders):
        return sights
    found = dict(sights)
    for endpoint, there, trouble in zip(question.holders, answer.seen, answer.trouble, strict=True):
        known = found.get(endpoint.holder)
        if known is None or known.epoch != question.epoch:
            continue
        beaten = known.there and not there and (known.answered_seconds or 0.0) >= question.asked_seconds
        if not beaten:
            found[endpoint.holder] = replace(known, answered_seconds=now, there=there, trouble=trouble)
    return found
