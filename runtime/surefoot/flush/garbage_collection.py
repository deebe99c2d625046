"""Deletes old saves: from memory without a coordinator, from the persistent tier in library mode.

The agent of group rank 0 does it. So checkpointing outlives the operator. It deletes by the leader's own rules, with
the writer's epoch (a newer claim refuses it), only on holder instances it has just read and found sealed for its
epoch, and it never lowers R by its own view of who is alive: what it may drop without R is `retention.outlived`. The
agent calls `collect_garbage` from a thread.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

from surefoot import metrics
from surefoot.errors import ChunkMissing, Corrupt, Fenced, ProtocolError, SurefootError, TierError, TierUnavailable
from surefoot.format.layouts import read_layout
from surefoot.memory_server import MemoryServerClient, MemoryServerIndex
from surefoot.protocol.checkpoints.completeness import (
    Covers,
    Lineage,
    TierReading,
    UnreadRecord,
    complete_checkpoints,
    complete_persistent,
    entry_of,
    layouts_to_check,
    newest_checkpoint,
    uncovered,
    watermark,
)
from surefoot.protocol.checkpoints.records import Layout, RankManifest
from surefoot.protocol.checkpoints.retention import (
    LossHistory,
    RetentionInputs,
    anomalous_checkpoints,
    last_good,
    last_good_and_required,
    memory_drops,
    persistent_drops,
    superseded_checkpoints,
)
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot.protocol.timeouts import Backoff
from surefoot.tiers.object_store import read_in_threads
from surefoot.tiers.persistent import ObjectStoreTier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GcScope:
    """Holds what the agent knows of its epoch.

    `replicas` is R as configured; `pinned` is under promotion, if anything is.
    """

    lineage: Lineage
    generation: int
    replicas: int
    keep: int
    domains: Mapping[MemoryServerInstance, str]
    pinned: Checkpoint | None = None
    sound: LossHistory | None = None
    """What the steps since the checkpoints have shown of them; None: nobody asks for it."""


@dataclass(frozen=True, slots=True)
class GcResult:
    """Reports what one collection found and removed."""

    watermark: Checkpoint | None
    dropped: int
    problems: tuple[str, ...]
    fenced: bool = False
    """A newer epoch rules the job: the round ended there, and each later one will."""


def collect_garbage(clients: Mapping[MemoryServerInstance, MemoryServerClient], charge: GcScope) -> GcResult:
    """Runs one round over the holders that answer.

    Never raises; the clients stay open.
    """
    problems: list[str] = []
    readings = _read(clients, charge.generation, problems)
    if any(index.fence > charge.generation for index in readings.values()):
        return GcResult(None, 0, tuple(problems), fenced=True)
    reading = TierReading({holder: index.manifests for holder, index in readings.items()}, None)
    covers = _covers(reading, [clients[holder] for holder in readings])
    newest_full = watermark(
        reading, charge.lineage, charge.generation, frozenset(), covers, charge.domains, charge.replicas
    )
    whole = complete_checkpoints(reading, charge.lineage, charge.generation, frozenset(), covers)
    superfluous = superseded_checkpoints(reading.servers, whole)
    if newest_full is None and not superfluous:
        return GcResult(None, 0, tuple(problems))
    good = kept_for_rollback(whole, tuple(chain.from_iterable(reading.servers.values())), charge.sound)
    dropped = 0
    for holder in readings:
        try:
            dropped += _collect_on(clients[holder], readings[holder], charge, newest_full, superfluous, good)
        except Fenced:
            return GcResult(newest_full, dropped, tuple(problems), fenced=True)
        except SurefootError as problem:
            problems.append(str(problem))
    metrics.fallbacks.labels("leaderless_gc").inc()
    return GcResult(newest_full, dropped, tuple(problems))


def _read(
    clients: Mapping[MemoryServerInstance, MemoryServerClient], epoch: int, problems: list[str]
) -> dict[MemoryServerInstance, MemoryServerIndex]:
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
    client: MemoryServerClient,
    index: MemoryServerIndex,
    charge: GcScope,
    newest_full: Checkpoint | None,
    superfluous: frozenset[Checkpoint],
    good: frozenset[Checkpoint],
) -> int:
    entry = entry_of(charge.lineage, charge.generation)
    standing = RetentionInputs(
        lineage=charge.lineage,
        generation=charge.generation,
        claimed=False,
        parent=entry.parent if entry is not None else None,
        watermark=newest_full,
        persistent=None,
        pinned=charge.pinned,
        unreadable=frozenset(),
        superseded=superfluous,
        known_good=good,
    )
    if newest_full is not None and index.watermark != newest_full:
        client.set_watermark(newest_full, charge.generation)
    chunks = {m.save: m.chunks for m in index.manifests}
    drops = memory_drops(index.manifests, standing, charge.keep)
    for save in drops:
        client.drop(save, charge.generation, chunks[save])
    return len(drops)


def kept_for_rollback(
    whole: list[Checkpoint], manifests: Sequence[RankManifest], sound: LossHistory | None
) -> frozenset[Checkpoint]:
    """Finds the checkpoints that newer ones do not replace.

    Nobody told this agent which one was the last good one, and a part of it may lie on a holder that it does not know of:
    behind the last that it can prove, whatever is not suspect stays, whole or not.
    """
    before = last_good(whole, manifests)
    kept = frozenset() if before is None else frozenset({before})
    if sound is None:
        return kept
    suspect = anomalous_checkpoints(manifests)
    last, staying = last_good_and_required(whole, suspect, sound)
    since = last.step if last is not None else 0
    parts = {m.save.checkpoint for m in manifests if m.save.step > since} - suspect
    return kept | staying | parts


def _covers(reading: TierReading, clients: list[MemoryServerClient]) -> Covers:
    layouts: dict[str, Layout] = {}
    answers: dict[frozenset[str], bool] = {}
    for digests in layouts_to_check(reading):
        for digest in digests - layouts.keys():
            layout = _read_layout_from_servers(digest, clients)
            if layout is not None:
                layouts[digest] = layout
        known = [layouts[d] for d in digests if d in layouts]
        answers[digests] = len(known) == len(digests) and uncovered(known) is None
    return answers


def _read_layout_from_servers(digest: str, clients: list[MemoryServerClient]) -> Layout | None:
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


# ---- survey of a persistent tier -------------------------------------------------------------------------------------
# Lists a persistent tier and names each record that cannot be read. Read by an agent that lists for the operator, and
# in library mode by whoever chooses a restore point or removes old checkpoints. Reading everything or nothing made one
# damaged record hide every checkpoint beside it; reading what can be read without a word made it look as if nothing had
# been there.

T = TypeVar("T")

_TRIES = 3
"""Of one read that the tier refuses: a single request that fails says nothing about what is there."""
_RETRY_BACKOFF = Backoff(0.1)
_MAX_SILENT = 16
"""Reads that may stay unanswered before the tier counts as away, and not these records as unreadable."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Lists what a tier has; `seen`: every checkpoint with any object."""

    all_checkpoints: tuple[Checkpoint, ...]
    manifests: tuple[RankManifest, ...]
    unread_records: tuple[UnreadRecord, ...] = ()


def survey_tier(
    tier: ObjectStoreTier,
    remembered: Mapping[RankSave, RankManifest] | None = None,
    named: Checkpoint | None = None,
) -> Survey:
    """Reads every manifest, and names those that it cannot.

    Raises TierUnavailable where the tier itself is away.

    `remembered`: manifests of an earlier look. One whose file is still there, as long as it was, is not read again.
    `named`: a checkpoint that is looked for by its name, as a stale listing may lack it.
    """
    seen = retry_while_unavailable(tier.list_all_checkpoints)
    if named is not None and named not in seen and retry_while_unavailable(lambda: tier.committed(named)):
        seen = tuple(sorted((*seen, named)))
    looks = read_in_threads(
        lambda checkpoint: retry_while_unavailable(lambda: tier.split_known(checkpoint, remembered)), seen
    )
    read = read_in_threads(lambda save: _manifest(tier, save), [save for _, unread in looks for save in unread])
    left_out = tuple(one for one in read if isinstance(one, UnreadRecord))
    _unless_away(left_out)
    found = [manifest for known, _ in looks for manifest in known]
    found += [one for one in read if isinstance(one, RankManifest)]
    return Survey(seen, tuple(sorted(found, key=lambda m: m.save)), left_out)


def layout_texts(tier: ObjectStoreTier, digests: Collection[str]) -> tuple[dict[str, str], tuple[UnreadRecord, ...]]:
    """Reads layout records by digest, and tells which are damaged."""
    wanted = sorted(digests)
    found = dict(zip(wanted, read_in_threads(lambda digest: _read_layout_from_tier(tier, digest), wanted), strict=True))
    left_out = tuple(one for one in found.values() if isinstance(one, UnreadRecord))
    _unless_away(left_out)
    return {digest: one for digest, one in found.items() if isinstance(one, str)}, left_out


def coverage(
    tier: ObjectStoreTier, manifests: Iterable[RankManifest], known: Covers | None = None
) -> tuple[Covers, tuple[UnreadRecord, ...]]:
    """Decides which sets of layouts cover every tensor.

    Of those that some world saved. Sets that cannot be judged are left out of the answer, and the record that is to
    blame is named. `known`: earlier answers, which hold for good.
    """
    wanted = layouts_to_check(TierReading({}, tuple(manifests)))
    covers = {digests: answer for digests, answer in (known or {}).items() if digests in wanted}
    texts, left_out = layout_texts(tier, {digest for digests in wanted - covers.keys() for digest in digests})
    for digests in wanted - covers.keys():
        if digests <= texts.keys():
            covers[digests] = uncovered(read_layout(digest, texts[digest]).layout for digest in digests) is None
    return covers, left_out


def undecidable_checkpoints(found: Survey, covers: Covers, left_out: Iterable[UnreadRecord]) -> dict[Checkpoint, str]:
    """Names checkpoints whose completeness cannot be judged.

    Each with the record that cannot be read and why.
    """
    layouts = {one.digest: one for one in left_out if one.digest is not None}
    told: dict[Checkpoint, str] = {
        one.checkpoint: str(one) for one in found.unread_records if one.checkpoint is not None
    }
    for checkpoint, ranks in TierReading({}, found.manifests).manifests().items():
        digests = frozenset(m.layout for copies in ranks.values() for m in copies)
        lost = sorted(digests & layouts.keys())
        if lost and digests not in covers:
            told.setdefault(checkpoint, str(layouts[lost[0]]))
    return told


def explain_unrestorable(found: Survey, covers: Covers, troubles: Mapping[Checkpoint, str]) -> dict[Checkpoint, str]:
    """Tells why checkpoints that are there cannot be restored.

    Those that can are not in it.
    """
    by_checkpoint = TierReading({}, found.manifests).manifests()
    told = {}
    for checkpoint in found.all_checkpoints:
        ranks = by_checkpoint.get(checkpoint, {})
        if checkpoint in troubles:
            told[checkpoint] = troubles[checkpoint]
        elif not ranks:
            told[checkpoint] = "no rank's manifest is there: its save was interrupted, or the files were removed"
        elif len(ranks) < (world := next(iter(ranks.values()))[0].world_size):
            missing = next(rank for rank in range(world) if rank not in ranks)
            told[checkpoint] = (
                f"{len(ranks)} of {world} ranks' manifests are there, rank {missing}'s is not: its save was interrupted,"
                " or the file was removed"
            )
        elif not covers.get(frozenset(m.layout for copies in ranks.values() for m in copies), False):
            told[checkpoint] = "its ranks' layouts do not make up every tensor once"
    return told


def retry_while_unavailable(read: Callable[[], T]) -> T:
    """Asks a tier again, a few times, where it is silent.

    Raises its last word.
    """
    for attempt in range(_TRIES):
        try:
            return read()
        except TierUnavailable:
            if attempt == _TRIES - 1:
                raise
            metrics.fallbacks.labels("tier_retried").inc()
            time.sleep(_RETRY_BACKOFF.seconds(attempt + 1, random.random()))
    raise AssertionError("unreachable: the last try returned or raised")


def _manifest(tier: ObjectStoreTier, save: RankSave) -> RankManifest | UnreadRecord | None:
    """Reads a manifest; None if it was removed since it was listed."""
    try:
        return retry_while_unavailable(lambda: tier.read_manifest(save))
    except ChunkMissing:
        return None
    except (TierError, Corrupt) as problem:
        return UnreadRecord(str(problem), isinstance(problem, TierError), checkpoint=save.checkpoint)


def _read_layout_from_tier(tier: ObjectStoreTier, digest: str) -> str | UnreadRecord:
    try:
        text = retry_while_unavailable(lambda: tier.read_layout(digest))
        read_layout(digest, text)
    except (TierError, Corrupt, ProtocolError) as problem:
        silent = isinstance(problem, TierError) and not isinstance(problem, ChunkMissing)
        return UnreadRecord(str(problem), silent, digest=digest)
    return text


def _unless_away(left_out: Collection[UnreadRecord]) -> None:
    silent = [one for one in left_out if one.silent]
    if len(silent) > _MAX_SILENT:
        raise TierUnavailable(f"{len(silent)} reads were not answered, the last: {silent[-1].reason}")


# ---- retention thread ------------------------------------------------------------------------------------------------
# Drops old checkpoints, and what failed saves left, in library mode. Rank 0 drops all but the newest n after each save;
# every rank makes room where the tier is full.

BEAT_SECONDS = 10.0
"""Between two signs of life of a program that writes to the tier."""
_MAX_DISCARDS = 8


class OvertakingWatch(Protocol):
    """Shows others that this program writes, and finds out whether one overtook it."""

    def beat(self, tier: ObjectStoreTier) -> None: ...
    def check(self, tier: ObjectStoreTier) -> bool: ...
    def end(self, tier: ObjectStoreTier) -> None: ...


class RetentionThread:
    """Removes superfluous checkpoints in one background thread.

    It looks after each save; several saves at once are one look. `watch`: of rank 0, which alone looks after saves.
    """

    def __init__(
        self,
        open_tier: Callable[[], ObjectStoreTier],
        lineage: Lineage,
        epoch: int,
        keep: int,
        watch: OvertakingWatch | None = None,
        leads: bool = True,
    ) -> None:
        self._open = open_tier
        self._lineage = lineage
        self._generation = epoch
        self._keep = keep
        self._watch, self._leads = watch, leads
        self._spared: frozenset[Checkpoint] = frozenset()
        self._overtaken_at: frozenset[Checkpoint] | None = None
        """What was there when another program was first seen to have overtaken this one: it may stand on it."""
        self.outdone = False
        """At the end: another program has overtaken this one, and saved; later starts go on from what that one saved."""
        self._covers: Covers = {}
        self._reported: set[Checkpoint] = set()
        self._full = False
        self._discards: deque[RankSave] = deque(maxlen=_MAX_DISCARDS)
        self._wakeups: queue.Queue[bool] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._run, name="surefoot-keeper", daemon=True)
        self._thread.start()

    def set_lineage(self, lineage: Lineage, spared: frozenset[Checkpoint]) -> None:
        """Sets the lineage that the epoch stands on, as finally decided.

        `spared` could not be judged then, and is never removed here.
        """
        self._lineage, self._spared = lineage, spared

    def wake(self, checkpoint: Checkpoint) -> None:
        """Looks again, since a rank save has come.

        Older ones may have become superfluous.
        """
        if self._leads:
            self._put(True)

    def make_room(self) -> None:
        """Drops the oldest complete checkpoint though it might stay: the tier is full, and a newer one waits."""
        self._full = True
        self._put(True)

    def discard(self, save: RankSave) -> None:
        """Removes what lies of a save that was given up and never committed."""
        self._discards.append(save)
        self._put(True)

    def close(self, wait_seconds: float = 5.0) -> None:
        """Finishes the look it is at, and ends."""
        try:
            self._wakeups.put(False, timeout=wait_seconds)
        except queue.Full:
            log.warning("the persistent tier hangs while old checkpoints are removed; the thread ends with the process")
        self._thread.join(wait_seconds)

    def _put(self, look: bool) -> None:
        try:
            self._wakeups.put_nowait(look)
        except queue.Full:
            pass  # a look that comes after this save is already queued

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            try:
                goes_on = self._wakeups.get(timeout=BEAT_SECONDS if self._watch is not None else None)
                self._guarded(self._tidy if goes_on else self._end)
            except queue.Empty:
                self._guarded(self._beat)

    def _guarded(self, work: Callable[[ObjectStoreTier], None]) -> None:
        try:
            with closing(self._open()) as tier:
                work(tier)
        except SurefootError as problem:
            metrics.fallbacks.labels("retention_failed").inc()
            log.warning("old checkpoints could not be removed: %s", problem)
        except Exception:
            metrics.fallbacks.labels("retention_failed").inc()
            log.exception("removing old checkpoints failed in an unexpected way")

    def _tidy(self, tier: ObjectStoreTier) -> None:
        while self._discards:
            tier.drop_unfinished(self._discards.popleft())
        if self._leads or self._full:
            self._keep_in(tier)
        self._beat(tier)

    def _beat(self, tier: ObjectStoreTier) -> None:
        if self._watch is not None:
            try:
                self._watch.beat(tier)
            except TierError as silent:
                metrics.fallbacks.labels("sign_of_life_unwritten").inc()
                log.info(
                    "%s did not take this program's sign of life, so others may not notice it: %s",
                    tier.location,
                    silent,
                )

    def _end(self, tier: ObjectStoreTier) -> None:
        if self._watch is not None:
            self.outdone = self._watch.check(tier) and any(
                c.generation > self._generation for c in tier.list_all_checkpoints()
            )
            self._watch.end(tier)

    def collect_now(self) -> list[Checkpoint]:
        """Drops what the rules let go; what was dropped."""
        with closing(self._open()) as tier:
            return self._keep_in(tier)

    def _keep_in(self, tier: ObjectStoreTier) -> list[Checkpoint]:
        full, self._full = self._full, False
        found = survey_tier(tier)
        if self._watch is not None and self._watch.check(tier) and self._overtaken_at is None:
            # the other one chose before it claimed, and may have seen what came since `found` was read
            self._overtaken_at = frozenset((*found.all_checkpoints, *tier.list_all_checkpoints()))
        if self._watch is None and tier.generations.is_overtaken(self._generation):
            return []  # a rank that only makes room does not know what the other program stands on
        drops = self._drops(tier, found, full)
        if self._overtaken_at is not None:
            drops = [c for c in drops if c.generation == self._generation and c not in self._overtaken_at]
        for checkpoint in drops:
            tier.drop_checkpoint(checkpoint)
        return drops

    def _drops(self, tier: ObjectStoreTier, found: Survey, full: bool) -> list[Checkpoint]:
        """Chooses what to drop. What cannot be read stays: it may be good, and only a person can say that it is not."""
        self._covers, left_out = coverage(tier, found.manifests, self._covers)
        troubles = undecidable_checkpoints(found, self._covers, left_out)
        for checkpoint in sorted(troubles.keys() - self._reported):
            log.warning("%s is not removed, as it cannot be judged: %s", checkpoint, troubles[checkpoint])
        self._reported |= troubles.keys()
        whole = complete_persistent(found.manifests, self._lineage, self._generation, frozenset(), self._covers)
        entry = entry_of(self._lineage, self._generation)
        standing = RetentionInputs(
            lineage=self._lineage,
            generation=self._generation,
            claimed=False,
            parent=entry.parent if entry is not None else None,
            watermark=None,
            persistent=newest_checkpoint(whole),
            pinned=None,
            unreadable=frozenset(),
            known_good=frozenset(c for c in (last_good(whole, found.manifests),) if c is not None),
        )
        keep = max(1, min(self._keep, len(whole)) - 1) if full else self._keep
        unsure = self._spared | frozenset(troubles)
        return persistent_drops(whole, found.all_checkpoints, standing, keep, unjudged=unsure)
