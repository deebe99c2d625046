"""Writes saves to one target in a thread that owns the connection.

Each order is answered once, in the target's turn. Started and joined by `engine.Drain`. Whatever a tier raises becomes an answer; nothing
reaches the trainer.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from surefoot import metrics
from surefoot.errors import ChunkMissing, CopyRefused, Fenced, SaveExists, SurefootError, TierFull, TierUnavailable
from surefoot.flush.save_work import SaveWork
from surefoot.flush.slots import Acknowledged, LegEnded, LegRefused, SaveWritten, TargetFailed
from surefoot.flush.target_turns import TargetTurn
from surefoot.flush.token_bucket import TokenBucket
from surefoot.flush.unchanged_chunks import WrittenSave, base_of, successor
from surefoot.protocol.identities import HolderId
from surefoot.tiers import CopiesChunks, Tier, WritesAhead

log = logging.getLogger(__name__)

Answer = SaveWritten | Acknowledged | LegRefused | TargetFailed | LegEnded
Probe = Callable[[str], None]
"""Told each stage of a save as it is reached; tests die in it. Stages: staged, chunk, written, committed, freed."""


@dataclass(frozen=True, slots=True)
class WriterOrder:
    """Write every part of the slot's save, or commit it."""

    slot: int
    work: SaveWork
    verb: Literal["write", "commit"]


class TargetWriter:
    """One target, one connection, one thread."""

    def __init__(
        self,
        target: HolderId,
        open_tier: Callable[[HolderId], Tier],
        answer: Callable[[Answer], None],
        slots: int,
        paced: tuple[TokenBucket, Probe],
        turn: TargetTurn,
    ) -> None:
        self.target = target
        self._kind = "memory" if target.instance else "persistent"  # library mode drains to the persistent tier
        self._open = open_tier
        self._answer = answer
        self._pace, self._probe = paced
        self._turn = turn
        self._orders: queue.Queue[WriterOrder | None] = queue.Queue(maxsize=slots + 1)  # one order a slot, and the end
        self._tier: Tier | None = None
        self._written: WrittenSave | None = None
        """The last save that the target acknowledged."""
        self._told_refusal = False
        self._failures = ("", 0)
        """The last error, and how often it came since a save was acknowledged."""
        self._thread = threading.Thread(target=self._run, name=f"surefoot-writer-{target.node}", daemon=True)
        self._thread.start()

    def order(self, order: WriterOrder) -> None:
        """Hands an order over; each is answered exactly once."""
        self._orders.put_nowait(order)

    def end(self) -> None:
        """Ends the thread after the orders before this."""
        self._orders.put_nowait(None)

    def join(self, wait_seconds: float) -> bool:
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            began = time.monotonic()
            answer = self._in_turn(order)
            if isinstance(answer, SaveWritten | Acknowledged):
                phase = "replicate" if order.verb == "write" else "commit"
                metrics.checkpoint_seconds.labels(self._kind, phase).observe(time.monotonic() - began)
            del order  # the slot's memory must not be held while waiting
            self._answer(answer)
        self._disconnect()

    def _in_turn(self, order: WriterOrder) -> Answer:
        with self._turn.taken(lambda: order.work.is_stopped(self.target)) as outcome:
            if outcome == "turn":
                answer = self._carry_out(order)
                if isinstance(answer, TargetFailed) and answer.cause == "unavailable":
                    self._turn.fail()
                return answer
            if outcome == "stopped":
                return LegEnded(order.slot, self.target)
            silent = TierUnavailable(f"{self.target} did not answer another rank of this worker")
            return self._failed(order, "unavailable", silent)

    def _carry_out(self, order: WriterOrder) -> Answer:
        try:
            return self._write(order) if order.verb == "write" else self._commit(order)
        except Fenced as refusal:
            log.info("%s refused a save, a newer epoch rules: %s", self.target, refusal, extra=self._keys(order))
            metrics.checkpoint_failures.labels(self._kind, "fenced").inc()
            return LegRefused(order.slot, self.target)
        except SaveExists as taken:
            log.error("%s", taken, extra=self._keys(order))
            metrics.checkpoint_failures.labels(self._kind, "exists").inc()
            return LegRefused(order.slot, self.target)
        except ChunkMissing as missing:
            return self._failed(order, "missing", missing)
        except TierFull as full:
            self._disconnect()  # an answer may still be due
            return self._failed(order, "full", full)
        except SurefootError as away:
            self._disconnect()
            return self._failed(order, "unavailable", away)
        except Exception as unexpected:  # a thread that dies silently would hold its slots for ever
            log.exception("writing to %s failed in an unexpected way", self.target)
            self._disconnect()
            return self._failed(order, "unavailable", unexpected)

    def _keys(self, order: WriterOrder) -> dict[str, object]:
        save = order.work.sealed.save
        return {"holder": str(self.target), "rank": save.rank, "epoch": save.epoch}

    def _failed(
        self, order: WriterOrder, cause: Literal["unavailable", "full", "missing"], error: Exception
    ) -> TargetFailed:
        self._written = None  # whatever it was: the next try sends everything
        save = order.work.sealed.save
        text = str(error)
        self._failures = (text, self._failures[1] + 1 if self._failures[0] == text else 1)
        if self._failures[1].bit_count() == 1:  # an outage tries hundreds of times: one line each time that doubles
            again = f" ({self._failures[1]} times)" if self._failures[1] > 1 else ""
            log.warning(
                "%s of %s on %s failed%s: %s", order.verb, save, self.target, again, error, extra=self._keys(order)
            )
        metrics.checkpoint_failures.labels(self._kind, cause).inc()
        return TargetFailed(order.slot, self.target, cause, time.monotonic(), random.random(), text)

    def _write(self, order: WriterOrder) -> Answer:
        work, save = order.work, order.work.sealed.save
        tier = self._connect()
        # with every save: a record that was damaged since would make every later save unreadable too
        tier.put_layout(work.layout.digest, work.layout.text)
        ahead = tier if isinstance(tier, WritesAhead) else None
        put = tier.put_chunk if ahead is None else ahead.send_chunk
        base, sent = self._base(work, tier), 0
        for index, length in enumerate(work.chunk_lengths):
            if work.is_stopped(self.target):
                self._disconnect()  # with whatever answers are still due
                return LegEnded(order.slot, self.target)
            work.digest(index)
            try:
                if base is not None and self._copied(tier, base, work, index):
                    continue
            except CopyRefused as refusal:
                base = None
                self._tell(refusal)
            if not self._pace.take(length):
                self._disconnect()
                return LegEnded(order.slot, self.target)
            put(save, index, work.chunk(index))
            sent += length
            self._probe("chunk")
        if ahead is not None:
            ahead.settle()
        manifest = work.manifest(self.target)
        if manifest is None:
            return LegEnded(order.slot, self.target)
        tier.put_digests(save, work.table)
        tier.put_values(save, work.values)
        metrics.checkpoint_bytes.labels(self._kind).inc(sent)
        metrics.unchanged_bytes.labels(self._kind).inc(work.sealed.stream_bytes - sent)
        self._probe("written")
        return SaveWritten(order.slot, self.target)

    def _commit(self, order: WriterOrder) -> Answer:
        work = order.work
        manifest = work.manifest(self.target)
        if manifest is None or work.is_stopped(self.target):
            return LegEnded(order.slot, self.target)
        tier = self._connect()
        tier.commit(manifest, work.sealed.save.epoch, work.chunk_lengths)
        base = self._base(work, tier)
        self._written = successor(base, work.sealed.save, work.layout.digest, work.table)
        self._failures = ("", 0)
        self._probe("committed")
        return Acknowledged(order.slot, self.target)

    def _base(self, work: SaveWork, tier: Tier) -> WrittenSave | None:
        """What unchanged chunks of a save are copied from; None: all of it is sent."""
        if not isinstance(tier, CopiesChunks):
            return None
        return base_of(self._written, work.sealed.save, work.layout.digest)

    def _copied(self, tier: Tier, base: WrittenSave, work: SaveWork, index: int) -> bool:
        """Whether the target made a chunk of its own copy of the same bytes."""
        if not isinstance(tier, CopiesChunks) or not base.has(work.layout, index, work.digests(index)):
            return False
        return tier.copy_chunk(base.save, work.sealed.save, index)

    def _tell(self, refusal: CopyRefused) -> None:
        metrics.fallbacks.labels("copy_refused").inc()
        if not self._told_refusal:
            log.warning("what is unchanged is sent to %s too: %s", self.target, refusal)
        self._told_refusal = True

    def _connect(self) -> Tier:
        if self._tier is None:
            self._tier = self._open(self.target)
        return self._tier

    def _disconnect(self) -> None:
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.close()
