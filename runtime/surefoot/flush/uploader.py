"""Copies one rank save between tiers and verifies every byte; uploads and repairs are built on it.

Each piece is read from the first source whose copy of it is intact, so a damaged chunk costs one more read, not the
save. A copy resumes where an earlier one ended, even if that process died: parts that the target already has, by length
and by its own checksum, are not sent again. The index entry is written last. Repeating a finished copy succeeds and
writes nothing. A target that commits only once rejects another save of the same name before a byte is written.
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
from surefoot.flush.engine import StageHook, WrittenSave, choose_copy_base, describe_written_save
from surefoot.format.layouts import Stream
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.timeouts import Backoff
from surefoot.tiers import CommitsOnce, SupportsPartCopy, SupportsParts, Tier
from surefoot.tiers.persistent import ObjectStoreTier
from surefoot.tiers.tier import is_listed, read_digest_table, read_stream, read_verified_chunk, read_verified_values

log = logging.getLogger(__name__)


T = TypeVar("T")


class PartSender:
    """Sends the parts of a save to a tier, as many at once as the tier accepts; no more than those are in memory."""

    def __init__(self, target: Tier, save: RankSave) -> None:
        self._target, self._save = target, save
        self._parts_tier = target if isinstance(target, SupportsParts) else None
        self.chunks_per_part = self._parts_tier.chunks_per_part if self._parts_tier is not None else 1
        self._present_parts = self._parts_tier.list_parts(save) if self._parts_tier is not None else {}
        self._max_parts = self._parts_tier.max_concurrent_parts if self._parts_tier is not None else 1
        self._pool = (
            ThreadPoolExecutor(self._max_parts, thread_name_prefix="surefoot-put") if self._max_parts > 1 else None
        )
        self._running_puts: deque[Future[int]] = deque()
        self._sent = 0

    def chunks_by_part(self, chunks: int) -> dict[int, range]:
        """Maps each part to the range of its chunks."""
        starts = range(0, chunks, self.chunks_per_part)
        return {part: range(start, min(chunks, start + self.chunks_per_part)) for part, start in enumerate(starts)}

    def wait_for_room(self) -> None:
        """Waits until another part may be read into memory; raises the error of an earlier part."""
        while len(self._running_puts) >= self._max_parts:
            self._sent += self._running_puts.popleft().result()

    def start_put(self, part: int, chunks: Sequence[memoryview]) -> None:
        """Starts sending one part, or sends it if the tier takes one at a time."""
        if self._pool is None:
            self._sent += self._put_part(part, chunks)
        else:
            self._running_puts.append(self._pool.submit(self._put_part, part, chunks))

    def copy_unchanged(self, base: RankSave, parts: Iterable[int]) -> frozenset[int]:
        """Has the tier copy parts of another save that it has; returns the parts that were copied."""
        target, missing_parts = self._target, [part for part in parts if part not in self._present_parts]
        if not isinstance(target, SupportsPartCopy) or self._pool is None:
            return frozenset()
        copies = self._pool.map(lambda part: target.copy_part(base, self._save, part), missing_parts)
        try:
            return frozenset(part for part, is_copied in zip(missing_parts, copies, strict=True) if is_copied)
        except CopyUnsupported as refusal:
            log.warning("%s cannot copy unchanged parts, so they are sent as well: %s", target.name, refusal)
            metrics.fallbacks.labels("copy_denied").inc()
            return frozenset()

    def wait_sent_bytes(self) -> int:
        """Waits for all parts and returns the number of bytes that had to be sent."""
        while self._running_puts:
            self._sent += self._running_puts.popleft().result()
        return self._sent

    def _put_part(self, part: int, chunks: Sequence[memoryview]) -> int:
        size = sum(len(chunk) for chunk in chunks)
        if self._parts_tier is None:
            for index, chunk in enumerate(chunks, part):
                self._target.put_chunk(self._save, index, chunk)
            return size
        if self._present_parts.get(part) == size and self._parts_tier.has_part(self._save, part, chunks):
            return 0
        self._parts_tier.put_part(self._save, part, chunks)
        return size

    def __enter__(self) -> PartSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for running writes; after an error it cancels the queued ones."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=kind is not None)


class CopyCancelled(SurefootError):
    """The copy was cancelled, because its worker ends."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The result of a finished copy."""

    sent_bytes: int
    """Bytes sent to the target."""
    unchanged_bytes: int
    """Bytes that the target copied from an earlier save."""
    written: WrittenSave | None
    """The save that the target has now; None: the target had it already."""


def copy_save(
    save: RankSave,
    sources: Sequence[Tier],
    target: Tier,
    writer_generation: int,
    pace: TokenBucket,
    earlier_save: WrittenSave | None = None,
) -> CopyResult:
    """Copies a rank save to a tier and commits it there.

    Args:
        save: The rank save.
        sources: Tiers that may have it; each piece is read from the first intact copy.
        target: The tier to copy to.
        writer_epoch: The generation that writes.
        pace: Bandwidth limit of the bytes that are sent.
        before: A save that the target has; parts that are equal there are copied within the target.

    Raises:
        Unreadable: A piece is damaged or missing in every source.
        TierUnavailable: The same, but a source that did not answer might have it.
        SaveExists: The target has another save of that name; nothing was written.
        SurefootError: Any other error of the target.
    """
    manifest, sources_with_save, unavailable = _manifest_of(save, sources)
    if isinstance(target, CommitsOnce) and target.has_committed(manifest):
        return CopyResult(0, 0, None)
    try:
        base = choose_copy_base(earlier_save, save, manifest.layout)
        return _copy_pieces(manifest, sources_with_save, target, (writer_generation, pace), base)
    except Unreadable as problem:
        if unavailable is None:
            raise
        raise unavailable from problem  # the source that did not answer may have an intact copy


def _copy_pieces(
    manifest: RankManifest,
    sources: Sequence[Tier],
    target: Tier,
    how: tuple[int, TokenBucket],
    base: WrittenSave | None,
) -> CopyResult:
    """Copies a save's layout, chunks, digests and values, then commits it; `how` is (writer generation, pace)."""
    save, (writer_generation, pace) = manifest.save, how
    stream = _read_first_intact("layout", save, sources, lambda tier: read_stream(tier, manifest))
    table = _read_first_intact("digest table", save, sources, lambda tier: read_digest_table(tier, manifest))
    values = _read_first_intact("values", save, sources, lambda tier: read_verified_values(tier, manifest))
    target.put_layout(manifest.layout, stream.text)
    chunk_lengths = stream.layout.chunk_lengths()
    unchanged_bytes = 0
    with PartSender(target, save) as sender:
        parts = sender.chunks_by_part(len(chunk_lengths))
        # Parts that are equal in the previous save are copied within the target; the others are sent.
        equal_parts = {
            p for p, chunks in parts.items() if base is not None and base.has_equal_chunks(stream, chunks, table)
        }
        copied_parts = (
            sender.copy_unchanged(base.save, sorted(equal_parts)) if base is not None and equal_parts else frozenset()
        )
        for part, chunks in parts.items():
            size = sum(chunk_lengths[index] for index in chunks)
            if part in copied_parts:
                unchanged_bytes += size
                continue
            if not pace.wait_for(size):
                raise CopyCancelled(f"copying {save} to {target.name} was cancelled, because the worker ends")
            sender.wait_for_room()
            sender.start_put(part, [_read_chunk(save, sources, (manifest, stream, table), index) for index in chunks])
        sent_bytes = sender.wait_sent_bytes()
    # Readers trust a committed save, so the commit follows once every part is stored.
    target.put_digests(save, table)
    target.put_values(save, values)
    target.commit(manifest, writer_generation, chunk_lengths)
    written = describe_written_save(base, save, manifest.layout, table)
    return CopyResult(sent_bytes + len(table) + len(values), unchanged_bytes, written)


def repair_save(save: RankSave, source: Tier, target: Tier, generation: int, pace: TokenBucket) -> str | None:
    """Copies a rank save between memory servers, verifies and commits it, and closes both tiers.

    Returns:
        None, or the reason for its failure.
    """
    try:
        size = copy_save(save, [source], target, generation, pace).sent_bytes
    except SurefootError as error:
        log.warning("could not repair %s by a copy from %s to %s: %s", save, source.name, target.name, error)
        return str(error)
    finally:
        source.close()
        target.close()
    log.info("repaired %s from %s to %s: %d bytes", save, source.name, target.name, size)
    return None


def _read_chunk(
    save: RankSave, sources: Sequence[Tier], records: tuple[RankManifest, Stream, bytes], index: int
) -> memoryview:
    manifest, stream, table = records
    read = partial(read_verified_chunk, manifest=manifest, stream=stream, table=table, index=index)
    return _read_first_intact(f"chunk {index}", save, sources, read)


def _manifest_of(save: RankSave, sources: Sequence[Tier]) -> tuple[RankManifest, list[Tier], TierUnavailable | None]:
    """Returns the manifest, the sources that list a save with these bytes, and the error of one without an answer."""
    entries: list[tuple[RankManifest, Tier]] = []
    errors: list[TierUnavailable] = []
    for tier in sources:
        try:
            entries += [(manifest, tier) for manifest in tier.manifests() if manifest.save == save]
        except TierUnavailable as error:
            errors.append(error)
    if entries:
        manifest = entries[0][0]
        sources_with_save = [tier for other, tier in entries if other.has_same_bytes_as(manifest)]
        return manifest, sources_with_save, next(iter(errors), None)
    if errors:
        raise errors[0]
    raise Unreadable(f"{save} is in the index of none of {', '.join(t.name for t in sources)}", absent=True)


def _read_first_intact(piece: str, save: RankSave, sources: Sequence[Tier], read: Callable[[Tier], T]) -> T:
    """Reads one piece of a save from the first source whose copy is intact."""
    problems: list[SurefootError] = []
    for tier in sources:
        try:
            return read(tier)
        except (Corrupt, ChunkMissing, TierUnavailable) as problem:
            metrics.restore_fallbacks.labels(
                "unreachable" if isinstance(problem, TierUnavailable) else metrics.reason_of(problem)
            ).inc()
            problems.append(problem)
    unavailable = next((p for p in problems if isinstance(p, TierUnavailable)), None)
    if unavailable is not None:
        raise unavailable  # this source may have an intact copy, so the save is not called unreadable
    absent = all(isinstance(p, ChunkMissing) for p in problems)
    absent = absent and not any(is_listed(tier, save) for tier in sources)
    raise Unreadable(
        f"{piece} of {save}: no source has an intact copy ({'; '.join(map(str, problems))})", absent=absent
    )


# ---- uploader --------------------------------------------------------------------------------------------------------
# Uploads a pinned checkpoint's rank saves from memory servers to the persistent tier, in the background. The agent has
# one Uploader. It reads the memory tier, not the arena, so an upload survives restarts of trainers and agents: an agent
# that receives the request again copies again, and equal bytes that already exist are a success.


@dataclass(frozen=True, slots=True)
class UploadOutcome:
    """The result of uploading one rank save."""

    save: RankSave
    error: str | None
    """Why the upload failed; None: the whole save is in the persistent tier."""
    sent_bytes: int
    """Bytes sent, excluding those that the persistent tier copied itself."""
    seconds: float
    is_unreadable: bool = False
    """Every source answered and every copy is damaged, so that a retry would fail as well."""


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """Settings of an `Uploader`."""

    rate_limit: TokenBucket | None = None
    """Bandwidth limit, which `close` stops; None: no limit."""
    attempts: int = 4
    """Attempts per request, before the outcome is reported as failed."""
    retry_seconds: float = 0.5
    """Backoff before the second attempt. It doubles each time, and jitter shortens it by up to half."""
    max_queued: int = 256
    """Rank saves that may be queued; more are answered with an error, and the leader requests them again."""
    stage_hook: StageHook | None = None
    """Called with "uploaded" when a save is uploaded; tests kill the process in it."""


class Uploader:
    """Copies rank saves to the persistent tier in one thread, from which it calls `on_done` with each outcome."""

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
        self._pace = self._options.rate_limit or TokenBucket()
        self._queue: queue.Queue[tuple[RankSave, int] | None] = queue.Queue(maxsize=self._options.max_queued)
        self._pending_saves: set[RankSave] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._written: dict[int, WrittenSave] = {}
        """Last uploaded save by rank. A failed upload removes the entry, so the next attempt sends everything."""
        self._thread = threading.Thread(target=self._run, name="surefoot-uploader", daemon=True)
        self._thread.start()

    def queue_upload(self, generation: int, saves: Iterable[RankSave]) -> None:
        """Queues saves for upload and returns at once; a save that is queued or running is not queued twice."""
        for save in saves:
            with self._lock:
                if save in self._pending_saves:
                    continue
                self._pending_saves.add(save)
            try:
                self._queue.put_nowait((save, generation))
            except queue.Full:
                self._report_outcome(
                    UploadOutcome(
                        save, "this worker's upload queue is full; the upload is requested again later", 0, 0.0
                    )
                )

    def close(self, wait_seconds: float = 5.0) -> bool:
        """Cancels uploads (another worker can repeat them) and joins the thread; returns whether it ended."""
        self._closing.set()
        self._pace.stop()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the thread checks `_closing` between two uploads
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.is_set():
            queued_save = self._queue.get()
            if queued_save is None:
                return
            try:
                outcome = self._upload_with_retries(*queued_save)
            except Exception as unexpected:  # a dead thread would never answer the leader again
                log.exception("unexpected error while uploading %s", queued_save[0])
                outcome = UploadOutcome(queued_save[0], repr(unexpected), 0, 0.0)
            self._report_outcome(outcome)

    def _upload_with_retries(self, save: RankSave, generation: int) -> UploadOutcome:
        start = time.monotonic()
        error: str | None = None
        unreadable = False
        for attempt in range(self._options.attempts):
            try:
                result = self._copy_to_target(save, generation)
            except CopyCancelled as cancelled:
                return UploadOutcome(save, str(cancelled), 0, time.monotonic() - start)
            except SurefootError as problem:
                error, unreadable = str(problem), isinstance(problem, Unreadable) and not problem.absent
                metrics.checkpoint_failures.labels("persistent", metrics.reason_of(problem)).inc()
                log.warning("could not upload %s to the persistent tier: %s", save, problem)
                if not isinstance(problem, TierError) or isinstance(problem, SaveExists):
                    # The source is damaged or the name is taken, so a retry would fail too. The wait keeps the leader
                    # from requesting the upload again at once.
                    self._closing.wait(self._options.retry_seconds * 2)
                    break
                backoff_seconds = Backoff(self._options.retry_seconds).wait_seconds(attempt + 1, random.random())
                if attempt + 1 == self._options.attempts or self._closing.wait(backoff_seconds):
                    break
            else:
                seconds = time.monotonic() - start
                if result.written is not None:
                    self._written[save.rank] = result.written
                metrics.checkpoint_bytes.labels("persistent").inc(result.sent_bytes)
                metrics.unchanged_bytes.labels("persistent").inc(result.unchanged_bytes)
                metrics.checkpoint_step.labels("persistent").set(save.step)
                metrics.checkpoint_seconds.labels("persistent", "upload").observe(seconds)
                return UploadOutcome(save, None, result.sent_bytes, seconds)
        return UploadOutcome(save, error, 0, time.monotonic() - start, unreadable)

    def _copy_to_target(self, save: RankSave, generation: int) -> CopyResult:
        open_tiers: list[Tier] = []
        try:
            sources = self._open_sources(save)
            open_tiers += sources
            target = self._open_target()
            open_tiers.append(target)
            return copy_save(save, sources, target, generation, self._pace, self._written.pop(save.rank, None))
        finally:
            for tier in open_tiers:
                tier.close()

    def _report_outcome(self, outcome: UploadOutcome) -> None:
        with self._lock:
            self._pending_saves.discard(outcome.save)
        if self._options.stage_hook is not None and outcome.error is None:
            self._options.stage_hook("uploaded")
        try:
            self._on_done(outcome)
        except Exception:
            metrics.fallbacks.labels("upload_callback_failed").inc()
            log.exception("a callback of the uploader failed; uploading continues")


def drop_checkpoints(tier: ObjectStoreTier, checkpoints: Iterable[Checkpoint]) -> str | None:
    """Deletes checkpoints from the persistent tier, each manifest first, and closes the tier.

    Returns:
        None, or the error at which it stopped.
    """
    try:
        for checkpoint in checkpoints:
            tier.drop_checkpoint(checkpoint)
    except SurefootError as error:
        log.warning("could not delete old checkpoints from the persistent tier: %s", error)
        return str(error)
    finally:
        tier.close()
    return None
