"""Merges agents' answers about holders that the operator cannot reach.

Pure; part of `orders`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from surefoot.protocol.identities import HolderEndpoint, HolderId
from surefoot.protocol.messages import Sighting
from surefoot_operator.observed import SightSeen

Sightings = Mapping[HolderId, SightSeen]


@dataclass(frozen=True, slots=True)
class SightingRequest:
    """A question to one agent about holders."""

    epoch: int
    asked_seconds: float
    holders: tuple[HolderEndpoint, ...]


def asked(sights: Sightings, question: SightingRequest) -> Sightings:
    """Records a question and drops what older epochs saw."""
    found = {holder: sight for holder, sight in sights.items() if sight.epoch == question.epoch}
    for endpoint in question.holders:
        now = question.asked_seconds
        known = found.get(endpoint.holder, SightSeen(question.epoch, now, now))
        found[endpoint.holder] = replace(known, asked_seconds=now)
    return found


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
