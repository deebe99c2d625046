"""`Consumption` counts which of a loader's batches were trained on.

A prefetcher takes batches that no step has used yet; gradient accumulation uses several in one step. The count alone
does not tell one from the other. Prefetched batches taken for consumed are lost at each restart; accumulated ones taken
for prefetched are trained on twice. So the number fetched ahead is learned once, at the first step, where it is certain
or was given; an uncertain one is refused there, before there is progress to lose.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from surefoot.errors import ConfigurationError, StateMismatch

T = TypeVar("T")
_log = logging.getLogger(__name__)

BeforeBatch = Callable[[bool], None]
"""Called before a batch is fetched; True: a new iterator asks for its first one."""

_consumptions: weakref.WeakSet[Consumption] = weakref.WeakSet()
_uncounted = [0]


def all_consumptions() -> list[Consumption]:
    """Returns those of all loaders of this process."""
    return list(_consumptions)


def uncounted_batches() -> int:
    """Returns how many batches were yielded by loaders that no Checkpointer counts."""
    return _uncounted[0]


def consumption_of(loader: Any) -> Consumption | None:
    """Returns what counts a loader's batches; None: it is another library's."""
    consumption = getattr(getattr(loader, "sampler", loader), "_consumption", None)
    return consumption if isinstance(consumption, Consumption) else None


class Consumption:
    """`Consumption` tracks the batches of one loader.

    Batches are numbered from the position at which the loader's state was last loaded.

    Args:
        batches_per_step: batches that one training step consumes; None where the script did not say.

    Raises:
        ConfigurationError: `batches_per_step` is below 1.
    """

    def __init__(self, batches_per_step: int | None = None) -> None:
        if batches_per_step is not None and batches_per_step < 1:
            raise ConfigurationError(f"batches_per_step={batches_per_step}: a step takes at least one batch")
        self._per_step = batches_per_step
        self._by_step = self._by_hand = False
        self._ahead: int | None = None
        """How many batches are fetched ahead of the step that uses them; None: not known before the first step."""
        self._over = False
        """The newest iterator has ended: nothing more is fetched ahead, and steps use up what was."""
        self._iterators = 0
        self._takers: set[int] = set()
        self._last_taker = 0
        """Thread that took the newest batch."""
        self._before_batch: BeforeBatch | None = None
        self._newest = 0
        """The newest iterator's number: one made before a restore, or before another, must not go on."""
        self._next = 0
        self._reported = 0
        self.consumed = 0
        """The first batch that was not trained on."""
        self.batches_yielded = 0
        """Batches handed out in all, also those that were handed out again."""
        self.source: Any = None
        """The data set of the loader; None: not known."""
        self.source_digest: str | None = None
        """Digest of some of its samples; None: not known."""
        self.is_epoch_read = True
        """Whether the script asked for the epoch since the state was restored in a later one than the first."""
        self._restored_epoch = 0
        self.is_state_taken = False
        """Whether the script saves the loader's state by itself."""
        _consumptions.add(self)

    @property
    def by_step(self) -> bool:
        """Whether `step_ends` decides what was consumed."""
        return self._by_step

    @property
    def is_over(self) -> bool:
        """Whether the newest iterator has ended."""
        return self._over

    @property
    def per_step(self) -> int:
        """Batches that one step consumes, as far as the script said."""
        return self._per_step or 1

    @property
    def by_hand(self) -> bool:
        """Whether the script commits batches.

        Then steps may take unlike numbers of them.
        """
        return self._by_hand

    @property
    def is_taken_here(self) -> bool:
        """Whether the newest batch was taken in the calling thread."""
        return self._last_taker == threading.get_ident()

    def count_by_step(self, before_batch: BeforeBatch | None = None) -> None:
        """Makes `end_step` decide what was consumed, from here on.

        Without it every batch handed out counts as consumed. `before_batch` is called from then on.
        """
        self._by_step = True
        self._before_batch = before_batch
        self.reset_counts()

    def reset_counts(self) -> None:
        """Resets all counts but `handed_out`, because another state was loaded.

        Kept, batches handed out before a restore would count as steps of the restored run.
        """
        self._ahead, self._iterators, self._over = None, 0, False
        self._takers.clear()
        self._next = self._reported = self.consumed = 0

    def restored(self, epoch: int = 0) -> None:
        """Resets all counts, and ends the iterators made before.

        Args:
            epoch: In which a loader with `by_epoch` continues.
        """
        self._newest += 1
        self.is_epoch_read, self._restored_epoch = epoch == 0, epoch
        self.reset_counts()

    def report_plain_range(self) -> None:
        """Reports once that a loop over epochs may count them from 0 after a restore."""
        if self.is_epoch_read:
            return
        self.is_epoch_read = True
        _log.warning(
            "training continues in epoch %d, counted from 0, and the script has not asked for loader.epoch: a loop over range(epochs)"
            " would train %d epochs too many. Write: for epoch in loader.epochs(epochs)",
            self._restored_epoch,
            self._restored_epoch,
        )

    def counted(self, found: Iterator[T]) -> Iterator[T]:
        """Counts each of the newest iterator's batches as handed out.

        Raises:
            StateMismatch: a newer iterator was begun, or the state was restored.
        """
        mine = self._newest
        while True:
            if mine != self._newest:
                raise StateMismatch(
                    "this iterator was made before the loader's state was restored, or before a newer iterator: what it"
                    " hands out is not what the loader counts. Call restore() first, then iter(loader), once"
                )
            self.announce_request()
            try:
                one = next(found)
            except StopIteration:
                self.end()
                return
            self.count_yielded()
            yield one

    def begin(self) -> int:
        """Starts a new iterator and returns the number of its first batch.

        Batches known to be fetched ahead are handed out again. While that is unknown, the iterator continues behind the
        last batch handed out: a script that makes an iterator for each batch would else get the same batch every time.
        """
        self.announce_request(is_first=True)
        self.report_plain_range()
        self._newest += 1
        ended, self._over = self._over, False
        # one that ran dry left nothing fetched ahead: what was taken is as certain as with one iterator
        self._iterators = 1 if ended else self._iterators + 1
        if ended and self._by_step and not self._by_hand and self._ahead != 0:
            carried = self._next - self.consumed < (self._per_step or 1)  # gradients that the next epoch's batches join
            if not carried:
                self._next = self.consumed
        elif self._by_hand or (self._by_step and self._ahead is None and self._per_step == 1):
            self._next = self.consumed
        else:
            self._next = max(self.consumed, self._next - (self._ahead or 0))
        return self._next

    def announce_request(self, is_first: bool = False) -> None:
        """Calls the Checkpointer before a batch is fetched, while the program is still as the last step left it."""
        if self._before_batch is not None:
            self._before_batch(is_first)

    def count_yielded(self) -> None:
        """Counts one batch that leaves the loader."""
        self._next += 1
        self.batches_yielded += 1
        self._last_taker = threading.get_ident()
        if not self._by_step:
            self.consumed = self._next
            _uncounted[0] += 1
        elif self._ahead is None:
            self._takers.add(threading.get_ident())

    def end(self) -> None:
        """Notes that the newest iterator is exhausted."""
        self._over = True

    def commit(self, batches: int) -> None:
        """Counts the next `batches` handed out as trained on.

        From then on `step_ends` adds nothing by itself.

        Raises:
            ConfigurationError: fewer batches were handed out and not yet consumed; where batches count when they are
                handed out (no `count_by_step`), none ever are.
        """
        waiting = self._next - self.consumed
        if not 0 <= batches <= waiting:
            raise ConfigurationError(f"commit({batches}): {waiting} batches were handed out and not yet committed")
        self._by_hand = True
        self.consumed += batches

    def end_step(self) -> tuple[int, int]:
        """Ends a step and returns its batches as the range `[first, last)`.

        Raises:
            ConfigurationError: whether batches were used or fetched ahead is uncertain at the first step.
        """
        if self._by_step and not self._by_hand and self._next > self.consumed:
            if self._over:
                self._use_up()
            else:
                if self._ahead is None:
                    self._ahead = self._learned(self._next - self.consumed)
                self.consumed = max(self.consumed, self._next - self._ahead)
        first, self._reported = self._reported, self.consumed
        return first, self.consumed

    def _use_up(self) -> None:
        """Consumes one step's batches of an exhausted iterator; learns nothing about the number fetched ahead."""
        waiting = self._next - self.consumed
        if self._ahead is None:
            if waiting > 1 and self._per_step is None:
                self._learned(waiting)  # refuses
            self._iterators = 0
        used = 0 if self._ahead is None else self._next - self._ahead
        self.consumed = min(self._next, max(used, self.consumed + (self._per_step or 1)))

    def _learned(self, taken: int) -> int:
        """Returns how many of the batches taken before the first step that step did not use."""
        if self._takers - {threading.get_ident()}:
            raise ConfigurationError(
                "batches are taken from the loader in another thread than step() is called in, so how many of them wait"
                " there is not known: call loader.commit() for each batch that was trained on"
            )
        certain = taken == (self._per_step or 1) or (self._per_step is not None and self._iterators == 1)
        if taken < (self._per_step or 1) or not certain:
            said = "" if self._per_step is None else f" of batches_per_step={self._per_step}"
            raise ConfigurationError(
                f"{taken} batches were taken from the loader before the first step{said}, and whether it trained on all"
                f" of them is not known: give ElasticLoader batches_per_step={taken} if it did,"
                " batches_per_step=1 if a prefetcher took the rest ahead, or call loader.commit() for each batch that"
                " was trained on"
            )
        return taken - (self._per_step or 1)
