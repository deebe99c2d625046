"""Advances the watermark and drops old saves while no leader is there.

The agent of group rank 0 does it. So checkpointing outlives the operator. It deletes by the leader's own rules, with
the writer's epoch (a newer claim refuses it), only on holder instances it has just read and found sealed for its
epoch, and it never lowers R by its own view of who is alive: what it may drop without R is `retention.outlived`. The
agent calls `collect_garbage` from a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from surefoot import metrics
from surefoot.errors import Corrupt, Fenced, ProtocolError, SurefootError
from surefoot.format.layouts import read_layout
from surefoot.memory_server import HolderClient, HolderIndex
from surefoot.protocol.checkpoints.completeness import Covers, TierReading, complete, layouts_to_check, watermark
from surefoot.protocol.checkpoints.coverage import uncovered
from surefoot.protocol.checkpoints.lineage import Lineage, entry_of
from surefoot.protocol.checkpoints.records import Layout, RankManifest
from surefoot.protocol.checkpoints.retention import (
    SoundSteps,
    Standing,
    last_good,
    memory_drops,
    outlived,
    proven,
    suspects,
)
from surefoot.protocol.identities import Checkpoint, HolderId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GcScope:
    """Holds what the agent knows of its epoch.

    `replicas` is R as configured; `pinned` is under promotion, if anything is.
    """

    lineage: Lineage
    epoch: int
    replicas: int
    keep: int
    domains: Mapping[HolderId, str]
    pinned: Checkpoint | None = None
    sound: SoundSteps | None = None
    """What the steps since the checkpoints have shown of them; None: nobody asks for it."""


@dataclass(frozen=True, slots=True)
class GcResult:
    """Reports what one collection found and removed."""

    watermark: Checkpoint | None
    dropped: int
    problems: tuple[str, ...]
    fenced: bool = False
    """A newer epoch rules the job: the round ended there, and each later one will."""


def collect_garbage(clients: Mapping[HolderId, HolderClient], charge: GcScope) -> GcResult:
    """Runs one round over the holders that answer.

    Never raises; the clients stay open.
    """
    problems: list[str] = []
    readings = _read(clients, charge.epoch, problems)
    if any(index.fence > charge.epoch for index in readings.values()):
        return GcResult(None, 0, tuple(problems), fenced=True)
    reading = TierReading({holder: index.manifests for holder, index in readings.items()}, None)
    covers = _covers(reading, [clients[holder] for holder in readings])
    newest_full = watermark(reading, charge.lineage, charge.epoch, frozenset(), covers, charge.domains, charge.replicas)
    whole = complete(reading, charge.lineage, charge.epoch, frozenset(), covers)
    superfluous = outlived(reading.holders, whole)
    if newest_full is None and not superfluous:
        return GcResult(None, 0, tuple(problems))
    good = spared_good(whole, tuple(chain.from_iterable(reading.holders.values())), charge.sound)
    dropped = 0
    for holder in readings:
        try:
            dropped += _collect_on(clients[holder], readings[holder], charge, newest_full, superfluous, good)
        except Fenced:
            return GcResult(newest_full, dropped, tuple(problems), fenced=True)
        except SurefootError as problem:
            problems.append(str(problem))
    metrics.fallbacks.labels("upkeep_without_leader").inc()
    return GcResult(newest_full, dropped, tuple(problems))


def _read(clients: Mapping[HolderId, HolderClient], epoch: int, problems: list[str]) -> dict[HolderId, HolderIndex]:
    """Indexes of the holders that answer; those not yet sealed for the epoch count in nothing."""
    found = {}
    for holder, client in sorted(clients.items()):
        try:
            index = client.index()
        except SurefootError as problem:
            problems.append(str(problem))
            continue
        if index.fence >= epoch:
            found[holder] = index
    return found


def _collect_on(
    client: HolderClient,
    index: HolderIndex,
    charge: GcScope,
    newest_full: Checkpoint | None,
    superfluous: frozenset[Checkpoint],
    good: frozenset[Checkpoint],
) -> int:
    entry = entry_of(charge.lineage, charge.epoch)
    standing = Standing(
        lineage=charge.lineage,
        epoch=charge.epoch,
        claimed=False,
        parent=entry.parent if entry is not None else None,
        watermark=newest_full,
        persistent=None,
        pinned=charge.pinned,
        bad=frozenset(),
        outlived=superfluous,
        good=good,
    )
    if newest_full is not None and index.watermark != newest_full:
        client.set_watermark(newest_full, charge.epoch)
    chunks = {m.save: m.chunks for m in index.manifests}
    drops = memory_drops(index.manifests, standing, charge.keep)
    for save in drops:
        client.drop(save, charge.epoch, chunks[save])
    return len(drops)


def spared_good(
    whole: list[Checkpoint], manifests: Sequence[RankManifest], sound: SoundSteps | None
) -> frozenset[Checkpoint]:
    """Finds the checkpoints that newer ones do not replace.

    Nobody told this agent which one was the last good one, and a part of it may lie on a holder that it does not know of:
    behind the last that it can prove, whatever is not suspect stays, whole or not.
    """
    before = last_good(whole, manifests)
    kept = frozenset() if before is None else frozenset({before})
    if sound is None:
        return kept
    suspect = suspects(manifests)
    last, staying = proven(whole, suspect, sound)
    since = last.step if last is not None else 0
    parts = {m.save.checkpoint for m in manifests if m.save.step > since} - suspect
    return kept | staying | parts


def _covers(reading: TierReading, clients: list[HolderClient]) -> Covers:
    layouts: dict[str, Layout] = {}
    answers: dict[frozenset[str], bool] = {}
    for digests in layouts_to_check(reading):
        for digest in digests - layouts.keys():
            layout = _layout(digest, clients)
            if layout is not None:
                layouts[digest] = layout
        known = [layouts[d] for d in digests if d in layouts]
        answers[digests] = len(known) == len(digests) and uncovered(known) is None
    return answers


def _layout(digest: str, clients: list[HolderClient]) -> Layout | None:
    """Reads a layout from the first holder with a good copy; without one the checkpoint counts as incomplete, and
    protects nothing."""
    for client in clients:
        try:
            return read_layout(digest, client.read_layout(digest)).layout
        except (Corrupt, ProtocolError) as damaged:
            log.warning("a layout record is damaged at %s: %s", client, damaged)
        except SurefootError as problem:
            log.info("no layout %s from %s: %s", digest, client, problem)
    return None
