"""Deletes old saves: from the memory tier without a leader, from the persistent tier in library mode.

While no operator leads, the agent of group rank 0 deletes, so that checkpointing continues. It applies the leader's own
rules and is safe while a new leader takes over: it deletes with the writer's generation, which a newer claim fences, and only on
memory server instances that it has just read and found fenced for its generation. It never lowers R by its own view of
which servers are alive; the only saves it may delete without R copies are `retention.superseded_checkpoints`. The agent
calls `collect_garbage` from a thread.
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
    complete_in_persistent_tier,
    describe_uncovered_tensor,
    find_watermark,
    layout_sets_to_check,
    lineage_entry_of,
    newest_checkpoint,
)
from surefoot.protocol.checkpoints.records import Layout, RankManifest
from surefoot.protocol.checkpoints.retention import (
    LossHistory,
    RetentionInputs,
    anomalous_checkpoints,
    find_known_good,
    last_checkpoint_before_anomaly,
    memory_saves_to_delete,
    persistent_checkpoints_to_delete,
    superseded_checkpoints,
)
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot.protocol.timeouts import Backoff
from surefoot.tiers.object_store import read_in_threads
from surefoot.tiers.persistent import ObjectStoreTier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GcScope:
    """The facts about a generation by which its agent collects garbage."""

    lineage: Lineage
    generation: int
    replicas: int
    """Configured number of copies (R)."""
    keep: int
    """Number of newest checkpoints to keep."""
    domains: Mapping[MemoryServerInstance, str]
    """Failure domain of each memory server."""
    pinned: Checkpoint | None = None
    """The checkpoint that is being uploaded; None: none is."""
    loss_history: LossHistory | None = None
    """Losses of the steps since the checkpoints; None: the job does not keep a known-good checkpoint."""


@dataclass(frozen=True, slots=True)
class GcResult:
    """The result of one collection."""

    watermark: Checkpoint | None
    """The newest checkpoint with enough copies in memory; None: no checkpoint has them."""
    dropped_count: int
    """Number of rank saves deleted, summed over the memory servers."""
    problems: tuple[str, ...]
    """Errors of memory servers that did not answer or did not delete."""
    is_fenced: bool = False
    """The job has a newer generation: this collection stopped, and every later one will."""


def collect_garbage(clients: Mapping[MemoryServerInstance, MemoryServerClient], scope: GcScope) -> GcResult:
    """Deletes old saves on the memory servers that answer.

    Errors are returned, not raised; the clients stay open.
    """
    problems: list[str] = []
    readings = _read_indexes(clients, scope.generation, problems)
    if any(index.fence > scope.generation for index in readings.values()):
        return GcResult(None, 0, tuple(problems), is_fenced=True)
    # Judge what is there by the leader's rules.
    reading = TierReading({server: index.manifests for server, index in readings.items()}, None)
    covers = _judge_coverage(reading, [clients[server] for server in readings])
    new_watermark = find_watermark(
        reading, scope.lineage, scope.generation, frozenset(), covers, scope.domains, scope.replicas
    )
    complete = complete_checkpoints(reading, scope.lineage, scope.generation, frozenset(), covers)
    superseded = superseded_checkpoints(reading.servers, complete)
    if new_watermark is None and not superseded:
        return GcResult(None, 0, tuple(problems))
    rollback_points = select_rollback_points(
        complete, tuple(chain.from_iterable(reading.servers.values())), scope.loss_history
    )
    # Delete on each server; one that fails does not keep the others from it.
    dropped = 0
    for server in readings:
        try:
            dropped += _collect_on(clients[server], readings[server], scope, new_watermark, superseded, rollback_points)
        except Fenced:
            return GcResult(new_watermark, dropped, tuple(problems), is_fenced=True)
        except SurefootError as problem:
            problems.append(str(problem))
    metrics.fallbacks.labels("leaderless_gc").inc()
    return GcResult(new_watermark, dropped, tuple(problems))


def _read_indexes(
    clients: Mapping[MemoryServerInstance, MemoryServerClient], generation: int, problems: list[str]
) -> dict[MemoryServerInstance, MemoryServerIndex]:
    """Reads the indexes of the memory servers that answer and are fenced for the generation."""
    indexes = {}
    for server, client in sorted(clients.items()):
        try:
            index = client.read_index()
        except SurefootError as problem:
            problems.append(str(problem))
            continue
        if index.fence >= generation:
            indexes[server] = index
    return indexes


def _collect_on(
    client: MemoryServerClient,
    index: MemoryServerIndex,
    scope: GcScope,
    new_watermark: Checkpoint | None,
    superseded: frozenset[Checkpoint],
    rollback_points: frozenset[Checkpoint],
) -> int:
    """Sets the watermark on one memory server and deletes its old saves; returns how many."""
    entry = lineage_entry_of(scope.lineage, scope.generation)
    inputs = RetentionInputs(
        lineage=scope.lineage,
        generation=scope.generation,
        is_claimed=False,
        parent=entry.parent if entry is not None else None,
        watermark=new_watermark,
        persistent=None,
        pinned=scope.pinned,
        unreadable=frozenset(),
        superseded=superseded,
        known_good=rollback_points,
    )
    if new_watermark is not None and index.watermark != new_watermark:
        client.set_watermark(new_watermark, scope.generation)
    chunks = {m.save: m.chunks for m in index.manifests}
    drops = memory_saves_to_delete(index.manifests, inputs, scope.keep)
    for save in drops:
        client.delete_save(save, scope.generation, chunks[save])
    return len(drops)


def select_rollback_points(
    complete: list[Checkpoint], manifests: Sequence[RankManifest], loss_history: LossHistory | None
) -> frozenset[Checkpoint]:
    """Selects the checkpoints that a rollback may need although newer ones exist.

    This agent does not know which checkpoint the leader recorded as known good, and a part of it may be on a memory
    server that the agent does not know. Therefore every checkpoint without a loss anomaly that is newer than the last one
    proven good is kept, complete or not.
    """
    recorded_good = last_checkpoint_before_anomaly(complete, manifests)
    recorded = frozenset() if recorded_good is None else frozenset({recorded_good})
    if loss_history is None:
        return recorded
    anomalous = anomalous_checkpoints(manifests)
    proven_good, required = find_known_good(complete, anomalous, loss_history)
    proven_step = proven_good.step if proven_good is not None else 0
    newer = {m.save.checkpoint for m in manifests if m.save.step > proven_step} - anomalous
    return recorded | required | newer


def _judge_coverage(reading: TierReading, clients: list[MemoryServerClient]) -> Covers:
    """Decides for each set of layouts in the index whether it covers every tensor; False if one cannot be read."""
    layouts: dict[str, Layout] = {}
    answers: dict[frozenset[str], bool] = {}
    for digests in layout_sets_to_check(reading):
        for digest in digests - layouts.keys():
            layout = _read_layout_from_servers(digest, clients)
            if layout is not None:
                layouts[digest] = layout
        read_layouts = [layouts[d] for d in digests if d in layouts]
        answers[digests] = len(read_layouts) == len(digests) and describe_uncovered_tensor(read_layouts) is None
    return answers


def _read_layout_from_servers(digest: str, clients: list[MemoryServerClient]) -> Layout | None:
    """Reads a layout from the first memory server with an intact copy; None: its checkpoints count as incomplete."""
    for client in clients:
        try:
            return read_layout(digest, client.read_layout(digest)).layout
        except (Corrupt, ProtocolError) as damaged:
            log.warning("the copy of layout %s on %s is damaged; trying another: %s", digest, client, damaged)
        except SurefootError as problem:
            log.info("could not read layout %s from %s; trying another: %s", digest, client, problem)
    return None


# ---- survey of a persistent tier -------------------------------------------------------------------------------------
# Lists a persistent tier and names each record that cannot be read. Used by an agent that lists for the operator, and
# in library mode to choose a restore point and to remove old checkpoints. If one damaged record failed the listing, it
# would hide all intact checkpoints; if it were skipped silently, its checkpoint would appear never to have existed.

T = TypeVar("T")

_READ_ATTEMPTS = 3
"""Attempts per read: a single failed request does not show whether the record exists."""
_RETRY_BACKOFF = Backoff(0.1)
_MAX_UNANSWERED = 16
"""Unanswered reads up to which single records count as unreadable; with more, the whole tier counts as unavailable."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The contents of a persistent tier."""

    all_checkpoints: tuple[Checkpoint, ...]
    """Every checkpoint with at least one object, oldest first."""
    manifests: tuple[RankManifest, ...]
    """All manifests that could be read, ordered by save."""
    unread_records: tuple[UnreadRecord, ...] = ()
    """Manifests that exist and could not be read, each with the reason."""


def survey_tier(
    tier: ObjectStoreTier,
    cached_manifests: Mapping[RankSave, RankManifest] | None = None,
    expected_checkpoint: Checkpoint | None = None,
) -> Survey:
    """Reads every manifest of a tier, and names those that cannot be read.

    Args:
        tier: The persistent tier.
        remembered: Manifests of an earlier survey. One whose file still exists with the same length is not read again.
        named: A checkpoint to look up by name, because a stale listing may omit it; None: list only.

    Raises:
        TierUnavailable: The tier itself does not answer.
    """
    all_checkpoints = retry_while_unavailable(tier.list_all_checkpoints)
    if (
        expected_checkpoint is not None
        and expected_checkpoint not in all_checkpoints
        and retry_while_unavailable(lambda: tier.list_committed(expected_checkpoint))
    ):
        all_checkpoints = tuple(sorted((*all_checkpoints, expected_checkpoint)))
    # Split each checkpoint's saves into manifests that are still valid and saves whose manifest must be read.
    splits = read_in_threads(
        lambda checkpoint: retry_while_unavailable(lambda: tier.split_cached_manifests(checkpoint, cached_manifests)),
        all_checkpoints,
    )
    results = read_in_threads(
        lambda save: _read_manifest(tier, save), [save for _, unread in splits for save in unread]
    )
    unread_records = tuple(result for result in results if isinstance(result, UnreadRecord))
    _raise_if_unavailable(unread_records)
    manifests = [manifest for valid, _ in splits for manifest in valid]
    manifests += [result for result in results if isinstance(result, RankManifest)]
    return Survey(all_checkpoints, tuple(sorted(manifests, key=lambda m: m.save)), unread_records)


def read_layout_texts(
    tier: ObjectStoreTier, digests: Collection[str]
) -> tuple[dict[str, str], tuple[UnreadRecord, ...]]:
    """Reads layout records; returns the readable ones by digest, and those that could not be read."""
    sorted_digests = sorted(digests)
    results = read_in_threads(lambda digest: _read_layout_from_tier(tier, digest), sorted_digests)
    unread_records = tuple(result for result in results if isinstance(result, UnreadRecord))
    _raise_if_unavailable(unread_records)
    by_digest = dict(zip(sorted_digests, results, strict=True))
    return {digest: text for digest, text in by_digest.items() if isinstance(text, str)}, unread_records


def judge_coverage(
    tier: ObjectStoreTier, manifests: Iterable[RankManifest], cached_covers: Covers | None = None
) -> tuple[Covers, tuple[UnreadRecord, ...]]:
    """Decides for each set of layouts that some checkpoint uses whether it covers every tensor.

    Args:
        tier: The persistent tier.
        manifests: Manifests of the checkpoints.
        known: Earlier answers, which stay valid.

    Returns:
        The answers, without the sets that cannot be judged, and the records whose damage prevents that.
    """
    layout_sets = layout_sets_to_check(TierReading({}, tuple(manifests)))
    covers = {digests: answer for digests, answer in (cached_covers or {}).items() if digests in layout_sets}
    texts, left_out = read_layout_texts(tier, {digest for digests in layout_sets - covers.keys() for digest in digests})
    for digests in layout_sets - covers.keys():
        if digests <= texts.keys():
            covers[digests] = (
                describe_uncovered_tensor(read_layout(digest, texts[digest]).layout for digest in digests) is None
            )
    return covers, left_out


def undecidable_checkpoints(
    survey: Survey, covers: Covers, unread_records: Iterable[UnreadRecord]
) -> dict[Checkpoint, str]:
    """Returns the checkpoints whose completeness cannot be judged, each with the unreadable record and the reason."""
    layouts = {record.digest: record for record in unread_records if record.digest is not None}
    reasons: dict[Checkpoint, str] = {
        record.checkpoint: str(record) for record in survey.unread_records if record.checkpoint is not None
    }
    for checkpoint, ranks in TierReading({}, survey.manifests).manifests_by_rank().items():
        digests = frozenset(m.layout for copies in ranks.values() for m in copies)
        lost = sorted(digests & layouts.keys())
        if lost and digests not in covers:
            reasons.setdefault(checkpoint, str(layouts[lost[0]]))
    return reasons


def explain_unrestorable(
    survey: Survey, covers: Covers, undecidable: Mapping[Checkpoint, str]
) -> dict[Checkpoint, str]:
    """Returns the checkpoints of a survey that cannot be restored, each with the reason."""
    by_checkpoint = TierReading({}, survey.manifests).manifests_by_rank()
    reasons = {}
    for checkpoint in survey.all_checkpoints:
        ranks = by_checkpoint.get(checkpoint, {})
        if checkpoint in undecidable:
            reasons[checkpoint] = undecidable[checkpoint]
        elif not ranks:
            reasons[checkpoint] = "it has no rank's manifest: its save was interrupted, or the files were removed"
        elif len(ranks) < (world_size := next(iter(ranks.values()))[0].world_size):
            missing_rank = next(rank for rank in range(world_size) if rank not in ranks)
            reasons[checkpoint] = (
                f"it has {len(ranks)} of {world_size} ranks' manifests, without rank {missing_rank}'s: its save was"
                " interrupted, or the file was removed"
            )
        elif not covers.get(frozenset(m.layout for copies in ranks.values() for m in copies), False):
            reasons[checkpoint] = "its ranks' layouts do not cover every tensor exactly once"
    return reasons


def retry_while_unavailable(read: Callable[[], T]) -> T:
    """Reads from a tier, with a few attempts while it does not answer; then raises the last TierUnavailable."""
    for attempt in range(_READ_ATTEMPTS):
        try:
            return read()
        except TierUnavailable:
            if attempt == _READ_ATTEMPTS - 1:
                raise
            metrics.fallbacks.labels("tier_retried").inc()
            time.sleep(_RETRY_BACKOFF.wait_seconds(attempt + 1, random.random()))
    raise AssertionError("unreachable: the last attempt returned or raised")


def _read_manifest(tier: ObjectStoreTier, save: RankSave) -> RankManifest | UnreadRecord | None:
    """Reads a manifest; None if it was deleted after it was listed."""
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
        is_unanswered = isinstance(problem, TierError) and not isinstance(problem, ChunkMissing)
        return UnreadRecord(str(problem), is_unanswered, digest=digest)
    return text


def _raise_if_unavailable(left_out: Collection[UnreadRecord]) -> None:
    unanswered = [record for record in left_out if record.is_silent]
    if len(unanswered) > _MAX_UNANSWERED:
        raise TierUnavailable(f"the tier left {len(unanswered)} reads unanswered, the last: {unanswered[-1].reason}")


# ---- retention thread ------------------------------------------------------------------------------------------------
# Deletes old checkpoints and the remains of failed saves in library mode. After each save, rank 0 deletes all but the
# newest n; every rank frees space when the tier is full.

BEAT_SECONDS = 10.0
"""Interval between two heartbeats that a program writes to the tier."""
_MAX_DISCARDS = 8


class OvertakingWatch(Protocol):
    """Writes this program's heartbeats to the tier, and detects that another program has claimed a newer generation."""

    def beat(self, tier: ObjectStoreTier) -> None: ...
    def check(self, tier: ObjectStoreTier) -> bool: ...
    def end(self, tier: ObjectStoreTier) -> None: ...


class RetentionThread:
    """Deletes superfluous checkpoints in one background thread, once after each save or several saves."""

    def __init__(
        self,
        open_tier: Callable[[], ObjectStoreTier],
        lineage: Lineage,
        generation: int,
        keep: int,
        watch: OvertakingWatch | None = None,
        leads: bool = True,
    ) -> None:
        self._open = open_tier
        self._lineage = lineage
        self._generation = generation
        self._keep = keep
        self._watch, self._leads = watch, leads
        self._spared: frozenset[Checkpoint] = frozenset()
        self._overtaken_at: frozenset[Checkpoint] | None = None
        """Checkpoints that existed when another program was first seen to have overtaken this one. That program may
        have started from one of them, so none is deleted here."""
        self.was_overtaken = False
        """After `close`: another program has overtaken this one and saved; later runs continue from its checkpoints."""
        self._covers: Covers = {}
        self._reported: set[Checkpoint] = set()
        self._full = False
        self._discards: deque[RankSave] = deque(maxlen=_MAX_DISCARDS)
        self._wakeups: queue.Queue[bool] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._run, name="surefoot-retention", daemon=True)
        self._thread.start()

    def set_lineage(self, lineage: Lineage, spared: frozenset[Checkpoint]) -> None:
        """Sets the lineage of the generation, as finally decided.

        `spared` are checkpoints that could not be judged at that time; they are never deleted here.
        """
        self._lineage, self._spared = lineage, spared

    def collect_after_save(self, checkpoint: Checkpoint) -> None:
        """Starts a collection, because a rank save was written and older checkpoints may have become superfluous."""
        if self._leads:
            self._queue_wakeup(True)

    def free_space(self) -> None:
        """Deletes the oldest complete checkpoint even if the rules keep it: the tier is full, and a newer save waits."""
        self._full = True
        self._queue_wakeup(True)

    def discard_save(self, save: RankSave) -> None:
        """Deletes the remains of a save that was abandoned and never committed."""
        self._discards.append(save)
        self._queue_wakeup(True)

    def close(self, wait_seconds: float = 5.0) -> None:
        """Finishes the current collection and ends the thread."""
        try:
            self._wakeups.put(False, timeout=wait_seconds)
        except queue.Full:
            log.warning(
                "the persistent tier hangs while old checkpoints are being deleted; not waiting for it, as the thread"
                " ends with the process"
            )
        self._thread.join(wait_seconds)

    def _queue_wakeup(self, should_continue: bool) -> None:
        try:
            self._wakeups.put_nowait(should_continue)
        except queue.Full:
            pass  # a collection that starts after this save is already queued

    def _run(self) -> None:
        should_continue = True
        while should_continue:
            try:
                should_continue = self._wakeups.get(timeout=BEAT_SECONDS if self._watch is not None else None)
                self._run_with_tier(self._collect if should_continue else self._end)
            except queue.Empty:
                self._run_with_tier(self._beat)

    def _run_with_tier(self, work: Callable[[ObjectStoreTier], None]) -> None:
        try:
            with closing(self._open()) as tier:
                work(tier)
        except SurefootError as problem:
            metrics.fallbacks.labels("retention_failed").inc()
            log.warning("could not delete old checkpoints; trying again after the next save: %s", problem)
        except Exception:
            metrics.fallbacks.labels("retention_failed").inc()
            log.exception("unexpected error while deleting old checkpoints; trying again after the next save")

    def _collect(self, tier: ObjectStoreTier) -> None:
        while self._discards:
            tier.drop_unfinished(self._discards.popleft())
        if self._leads or self._full:
            self._delete_old_checkpoints(tier)
        self._beat(tier)

    def _beat(self, tier: ObjectStoreTier) -> None:
        if self._watch is not None:
            try:
                self._watch.beat(tier)
            except TierError as problem:
                metrics.fallbacks.labels("sign_of_life_unwritten").inc()
                log.info(
                    "could not write this program's heartbeat to %s, so other programs may not notice it: %s",
                    tier.location,
                    problem,
                )

    def _end(self, tier: ObjectStoreTier) -> None:
        if self._watch is not None:
            self.was_overtaken = self._watch.check(tier) and any(
                c.generation > self._generation for c in tier.list_all_checkpoints()
            )
            self._watch.end(tier)

    def collect_now(self) -> list[Checkpoint]:
        """Deletes what the retention rules do not keep, and returns the deleted checkpoints."""
        with closing(self._open()) as tier:
            return self._delete_old_checkpoints(tier)

    def _delete_old_checkpoints(self, tier: ObjectStoreTier) -> list[Checkpoint]:
        full, self._full = self._full, False
        survey = survey_tier(tier)
        if self._watch is not None and self._watch.check(tier) and self._overtaken_at is None:
            # The other program chose its parent before it claimed, possibly one written after the survey: list again.
            self._overtaken_at = frozenset((*survey.all_checkpoints, *tier.list_all_checkpoints()))
        if self._watch is None and tier.generations.is_overtaken(self._generation):
            return []  # a rank that only frees space does not know from which checkpoint the other program started
        drops = self._select_drops(tier, survey, full)
        if self._overtaken_at is not None:
            drops = [c for c in drops if c.generation == self._generation and c not in self._overtaken_at]
        for checkpoint in drops:
            tier.drop_checkpoint(checkpoint)
        return drops

    def _select_drops(self, tier: ObjectStoreTier, survey: Survey, full: bool) -> list[Checkpoint]:
        """Selects the checkpoints to delete; unreadable ones stay, as they may be good and only a user can decide."""
        # A checkpoint that cannot be judged is kept, and reported once.
        self._covers, left_out = judge_coverage(tier, survey.manifests, self._covers)
        troubles = undecidable_checkpoints(survey, self._covers, left_out)
        for checkpoint in sorted(troubles.keys() - self._reported):
            log.warning("%s is not deleted, because it cannot be judged: %s", checkpoint, troubles[checkpoint])
        self._reported |= troubles.keys()
        complete = complete_in_persistent_tier(
            survey.manifests, self._lineage, self._generation, frozenset(), self._covers
        )
        entry = lineage_entry_of(self._lineage, self._generation)
        inputs = RetentionInputs(
            lineage=self._lineage,
            generation=self._generation,
            is_claimed=False,
            parent=entry.parent if entry is not None else None,
            watermark=None,
            persistent=newest_checkpoint(complete),
            pinned=None,
            unreadable=frozenset(),
            known_good=frozenset(
                c for c in (last_checkpoint_before_anomaly(complete, survey.manifests),) if c is not None
            ),
        )
        # A full tier gives up one more checkpoint than the rules ask for, but never the last complete one.
        keep = max(1, min(self._keep, len(complete)) - 1) if full else self._keep
        undecidable = self._spared | frozenset(troubles)
        return persistent_checkpoints_to_delete(
            complete, survey.all_checkpoints, inputs, keep, possibly_good=undecidable
        )
