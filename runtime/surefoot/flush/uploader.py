"""Copies one rank save between tiers and verifies every byte.

Promotion and repair are made of this. Each piece is taken from the first source whose copy of it is good, so one
damaged chunk costs one other read, not the save. A copy goes on where an earlier one ended, also one whose process
died: what the target has already, by length and by its own checksum, is not sent again. The index entry comes last;
repeating a copy that is already there is success, and writes nothing. Where a target commits once, another save of the
same name is refused before a byte is written.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TypeVar

from surefoot import metrics
from surefoot.errors import (
    ChunkMissing,
    CopyUnsupported,
    Corrupt,
    SaveExists,
    SurefootError,
    TierError,
    TierUnavailable,
    Unreadable,
)
from surefoot.flush.bandwidth import TokenBucket
from surefoot.flush.engine import StageHook, WrittenSave, base_of, successor
from surefoot.format.layouts import Stream
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.timeouts import Backoff
from surefoot.tiers import CommitsOnce, SupportsPartCopy, SupportsParts, Tier
from surefoot.tiers.persistent import ObjectStoreTier
from surefoot.tiers.tier import chunk_from, is_listed, stream_from, table_from, values_from

log = logging.getLogger(__name__)


T = TypeVar("T")


class PartSender:
    """Sends parts to a tier, as many at once as it takes.

    Never more are in memory than that.
    """

    def __init__(self, target: Tier, save: RankSave) -> None:
        self._target, self._save = target, save
        self._many = target if isinstance(target, SupportsParts) else None
        self.together = self._many.together if self._many is not None else 1
        self._present_parts = self._many.list_parts(save) if self._many is not None else {}
        self._room = self._many.at_once if self._many is not None else 1
        self._pool = ThreadPoolExecutor(self._room, thread_name_prefix="surefoot-put") if self._room > 1 else None
        self._under_way: deque[Future[int]] = deque()
        self._sent = 0

    def parts_of(self, chunks: int) -> dict[int, range]:
        """Part → its chunks."""
        starts = range(0, chunks, self.together)
        return {part: range(start, min(chunks, start + self.together)) for part, start in enumerate(starts)}

    def make_room(self) -> None:
        """Waits until another part may be in memory.

        Raises what an earlier one raised.
        """
        while len(self._under_way) >= self._room:
            self._sent += self._under_way.popleft().result()

    def put(self, part: int, chunks: Sequence[memoryview]) -> None:
        """Begins one."""
        if self._pool is None:
            self._sent += self._put(part, chunks)
        else:
            self._under_way.append(self._pool.submit(self._put, part, chunks))

    def copy_unchanged(self, base: RankSave, parts: Iterable[int]) -> frozenset[int]:
        """Has the tier copy parts of another save; returns those copied."""
        target, wanted = self._target, [part for part in parts if part not in self._present_parts]
        if not isinstance(target, SupportsPartCopy) or self._pool is None:
            return frozenset()
        made = self._pool.map(lambda part: target.copy_part(base, self._save, part), wanted)
        try:
            return frozenset(part for part, is_made in zip(wanted, made, strict=True) if is_made)
        except CopyUnsupported as refusal:
            log.warning("what is unchanged is sent to %s too: %s", target.name, refusal)
            metrics.fallbacks.labels("copy_denied").inc()
            return frozenset()

    def sent(self) -> int:
        """Waits for all; the bytes that had to be sent."""
        while self._under_way:
            self._sent += self._under_way.popleft().result()
        return self._sent

    def _put(self, part: int, chunks: Sequence[memoryview]) -> int:
        size = sum(len(chunk) for chunk in chunks)
        if self._many is None:
            for index, chunk in enumerate(chunks, part):
                self._target.put_chunk(self._save, index, chunk)
            return size
        if self._present_parts.get(part) == size and self._many.has_part(self._save, part, chunks):
            return 0
        self._many.put_part(self._save, part, chunks)
        return size

    def __enter__(self) -> PartSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for writes under way; after an error it cancels queued ones."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=kind is not None)


class CopyCancelled(SurefootError):
    """The copy was called off."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Tells what a finished copy sent, and what it wrote."""

    sent_bytes: int
    unchanged_bytes: int
    written: WrittenSave | None
    """None: all of it was there."""


def copy_save(
    save: RankSave,
    sources: Sequence[Tier],
    target: Tier,
    writer_epoch: int,
    pace: TokenBucket,
    before: WrittenSave | None = None,
) -> CopyResult:
    """Copies a rank save to a tier and commits it there.

    Args:
        save: The rank save.
        sources: Tiers that may have it; each part comes from the first good copy.
        target: Where it goes.
        writer_epoch: The epoch that writes.
        pace: Of the bytes that are sent.
        before: A save that the target has; parts that are equal there are copied within it.

    Raises:
        Unreadable: Some part is bad or absent everywhere.
        TierUnavailable: The same, but a silent source might have it. Beside these whatever the target raises.
        SaveExists: The target has another save of that name; nothing was written.
    """
    manifest, having, silent = _manifest_of(save, sources)
    if isinstance(target, CommitsOnce) and target.has(manifest):
        return CopyResult(0, 0, None)
    try:
        return _copied(manifest, having, target, (writer_epoch, pace), base_of(before, save, manifest.layout))
    except Unreadable as found:
        if silent is None:
            raise
        raise silent from found  # it may have a good one


def _copied(
    manifest: RankManifest,
    having: Sequence[Tier],
    target: Tier,
    how: tuple[int, TokenBucket],
    base: WrittenSave | None,
) -> CopyResult:
    save, (writer_epoch, pace) = manifest.save, how
    stream = _first_good("layout", save, having, lambda tier: stream_from(tier, manifest))
    table = _first_good("digest table", save, having, lambda tier: table_from(tier, manifest))
    values = _first_good("values", save, having, lambda tier: values_from(tier, manifest))
    target.put_layout(manifest.layout, stream.text)
    lengths = stream.layout.chunk_lengths()
    unchanged = 0
    with PartSender(target, save) as puts:
        parts = puts.parts_of(len(lengths))
        same = {p for p, chunks in parts.items() if base is not None and base.has_all(stream, chunks, table)}
        copied = puts.copy_unchanged(base.save, sorted(same)) if base is not None and same else frozenset()
        for part, chunks in parts.items():
            size = sum(lengths[index] for index in chunks)
            if part in copied:
                unchanged += size
                continue
            if not pace.take(size):
                raise CopyCancelled(f"copying {save} to {target.name} was called off")
            puts.make_room()
            puts.put(part, [_chunk(save, having, (manifest, stream, table), index) for index in chunks])
        sent = puts.sent()
    target.put_digests(save, table)
    target.put_values(save, values)
    target.commit(manifest, writer_epoch, lengths)
    written = successor(base, save, manifest.layout, table)
    return CopyResult(sent + len(table) + len(values), unchanged, written)


def repair(save: RankSave, source: Tier, target: Tier, epoch: int, pace: TokenBucket) -> str | None:
    """Copies a rank save between holders, and closes both tiers.

    Verified, and committed with the writer epoch `epoch`. None, or why it failed.
    """
    try:
        size = copy_save(save, [source], target, epoch, pace).sent_bytes
    except SurefootError as error:
        log.warning("repairing %s from %s to %s failed: %s", save, source.name, target.name, error)
        return str(error)
    finally:
        source.close()
        target.close()
    log.info("repaired %s from %s to %s: %d bytes", save, source.name, target.name, size)
    return None


def _chunk(save: RankSave, sources: Sequence[Tier], what: tuple[RankManifest, Stream, bytes], index: int) -> memoryview:
    manifest, stream, table = what
    read = partial(chunk_from, manifest=manifest, stream=stream, table=table, index=index)
    return _first_good(f"chunk {index}", save, sources, read)


def _manifest_of(save: RankSave, sources: Sequence[Tier]) -> tuple[RankManifest, list[Tier], TierUnavailable | None]:
    """The manifest, the sources that have an index entry with the same bytes, and why one gave no index."""
    found: list[tuple[RankManifest, Tier]] = []
    silent: list[TierUnavailable] = []
    for tier in sources:
        try:
            found += [(manifest, tier) for manifest in tier.manifests() if manifest.save == save]
        except TierUnavailable as error:
            silent.append(error)
    if found:
        manifest = found[0][0]
        having = [tier for other, tier in found if other.same_bytes_as(manifest)]
        return manifest, having, next(iter(silent), None)
    if silent:
        raise silent[0]
    raise Unreadable(f"{save} is in the index of none of {', '.join(t.name for t in sources)}", absent=True)


def _first_good(what: str, save: RankSave, sources: Sequence[Tier], read: Callable[[Tier], T]) -> T:
    problems: list[SurefootError] = []
    for tier in sources:
        try:
            return read(tier)
        except (Corrupt, ChunkMissing, TierUnavailable) as problem:
            metrics.restore_fallbacks.labels(
                "unreachable" if isinstance(problem, TierUnavailable) else metrics.reason_of(problem)
            ).inc()
            problems.append(problem)
    silent = next((p for p in problems if isinstance(p, TierUnavailable)), None)
    if silent is not None:
        raise silent
    absent = all(isinstance(p, ChunkMissing) for p in problems)
    absent = absent and not any(is_listed(tier, save) for tier in sources)
    raise Unreadable(f"{what} of {save}: no copy is good ({'; '.join(map(str, problems))})", absent=absent)


# ---- promoter --------------------------------------------------------------------------------------------------------
# Uploads a pinned checkpoint's rank saves from holders to the persistent tier. In the background. The agent has one
# Promoter. Its source is the memory tier, not the arena, so a promotion survives restarts of trainers and agents:
# whoever is told again copies again, and equal bytes that are already there are success.


@dataclass(frozen=True, slots=True)
class UploadOutcome:
    """Tells how one promotion of a rank save ended.

    `error` is None if all of it is in the persistent tier.
    """

    save: RankSave
    error: str | None
    bytes: int
    seconds: float
    unreadable: bool = False
    """Every copy answered and is damaged; trying again finds the same."""


@dataclass(frozen=True, slots=True)
class UploadOptions:
    pace: TokenBucket | None = None
    """The promoter's own, stopped when it is closed; None: without a limit."""
    attempts: int = 4
    retry_seconds: float = 0.5
    """Wait before the second try; doubles each time, less up to half."""
    queued: int = 256
    """Rank saves that may wait; more are answered with an error, and the leader names them again."""
    stage_hook: StageHook | None = None


class Uploader:
    """Copies rank saves to the persistent tier in one thread.

    `promote` returns at once, `on_done` is called from the thread.
    """

    def __init__(
        self,
        open_sources: Callable[[RankSave], Sequence[Tier]],
        open_target: Callable[[], Tier],
        on_done: Callable[[UploadOutcome], None],
        options: UploadOptions | None = None,
    ) -> None:
        self._open_sources = open_sources
        self._open_target = open_target
        self._on_done = on_done
        self._options = options or UploadOptions()
        self._pace = self._options.pace or TokenBucket()
        self._orders: queue.Queue[tuple[RankSave, int] | None] = queue.Queue(maxsize=self._options.queued)
        self._waiting: set[RankSave] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._written: dict[int, WrittenSave] = {}
        """Of each rank the last save that was uploaded here; one that fails has none: the next try sends all of it."""
        self._thread = threading.Thread(target=self._run, name="surefoot-promoter", daemon=True)
        self._thread.start()

    def queue_upload(self, epoch: int, saves: Iterable[RankSave]) -> None:
        """Queues saves; one that already waits or runs is not queued twice."""
        for save in saves:
            with self._lock:
                if save in self._waiting:
                    continue
                self._waiting.add(save)
            try:
                self._orders.put_nowait((save, epoch))
            except queue.Full:
                self._finished(UploadOutcome(save, "too many promotions wait on this worker", 0, 0.0))

    def close(self, wait_seconds: float = 5.0) -> bool:
        """Calls off what is under way (it can be done again elsewhere) and joins the thread."""
        self._closing.set()
        self._pace.stop()
        try:
            self._orders.put_nowait(None)
        except queue.Full:
            pass  # the thread looks at the event between orders
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.is_set():
            order = self._orders.get()
            if order is None:
                return
            try:
                promoted = self._uploaded(*order)
            except Exception as unexpected:  # a promoter that dies silently would never answer the leader again
                log.exception("promoting %s failed in an unexpected way", order[0])
                promoted = UploadOutcome(order[0], repr(unexpected), 0, 0.0)
            self._finished(promoted)

    def _uploaded(self, save: RankSave, epoch: int) -> UploadOutcome:
        began = time.monotonic()
        error: str | None = None
        unreadable = False
        for attempt in range(self._options.attempts):
            try:
                copied = self._copied(save, epoch)
            except CopyCancelled as called_off:
                return UploadOutcome(save, str(called_off), 0, time.monotonic() - began)
            except SurefootError as problem:
                error, unreadable = str(problem), isinstance(problem, Unreadable) and not problem.absent
                metrics.checkpoint_failures.labels("persistent", metrics.reason_of(problem)).inc()
                log.warning("promoting %s failed: %s", save, problem)
                if not isinstance(problem, TierError) or isinstance(problem, SaveExists):
                    # the source is bad, or the name is taken: trying again finds the same, and who asks again shall not ask at once
                    self._closing.wait(self._options.retry_seconds * 2)
                    break
                wait = Backoff(self._options.retry_seconds).seconds(attempt + 1, random.random())
                if attempt + 1 == self._options.attempts or self._closing.wait(wait):
                    break
            else:
                seconds = time.monotonic() - began
                if copied.written is not None:
                    self._written[save.rank] = copied.written
                metrics.checkpoint_bytes.labels("persistent").inc(copied.sent_bytes)
                metrics.unchanged_bytes.labels("persistent").inc(copied.unchanged_bytes)
                metrics.checkpoint_step.labels("persistent").set(save.step)
                metrics.checkpoint_seconds.labels("persistent", "upload").observe(seconds)
                return UploadOutcome(save, None, copied.sent_bytes, seconds)
        return UploadOutcome(save, error, 0, time.monotonic() - began, unreadable)

    def _copied(self, save: RankSave, epoch: int) -> CopyResult:
        opened: list[Tier] = []
        try:
            sources = self._open_sources(save)
            opened += sources
            target = self._open_target()
            opened.append(target)
            return copy_save(save, sources, target, epoch, self._pace, self._written.pop(save.rank, None))
        finally:
            for tier in opened:
                tier.close()

    def _finished(self, promoted: UploadOutcome) -> None:
        with self._lock:
            self._waiting.discard(promoted.save)
        if self._options.stage_hook is not None and promoted.error is None:
            self._options.stage_hook("promoted")
        try:
            self._on_done(promoted)
        except Exception:
            metrics.fallbacks.labels("upload_callback_failed").inc()
            log.exception("a callback of the promoter failed; promoting goes on")


def drop_persistent(tier: ObjectStoreTier, checkpoints: Iterable[Checkpoint]) -> str | None:
    """Deletes checkpoints from the persistent tier, and closes it.

    Manifests first. None, or the first error.
    """
    try:
        for checkpoint in checkpoints:
            tier.drop_checkpoint(checkpoint)
    except SurefootError as error:
        log.warning("dropping from the persistent tier failed: %s", error)
        return str(error)
    finally:
        tier.close()
    return None
