"""`ElasticStream` makes batches of sources in shards, at any world size.

Each rank saves the state of its own lanes; a world of another size takes over those of all.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from surefoot.data.consumed_batches import BeforeBatch, Consumption
from surefoot.data.data_source import DataError, DataShard, DataSource, checks_of, identity_of
from surefoot.data.lanes import LaneAssignment, LaneCursor, UnconsumedRanges, make_assignments
from surefoot.data.length_grouping import Grouping, summed_over_ranks, token_weight
from surefoot.data.loader import Batch, check_options, default_collate_function, refuse_options
from surefoot.data.sampler import checked_rank
from surefoot.data.stream_state import (
    LaneCursors,
    StreamShape,
    check_state,
    decode_unconsumed,
    encode_unconsumed,
    joined_spans,
    lanes_as_plain,
    lanes_of_plain,
    merge_states,
    unconsumed_by_pass,
)
from surefoot.data.stream_workers import Read, Recipe, Transform, read_in_process, stacked
from surefoot.errors import ConfigurationError, StateMismatch

if TYPE_CHECKING:
    import torch


# ---- stream arguments ------------------------------------------------------------------------------------------------
# `stream_shape` and its neighbours refuse arguments that no stream can have. Called before a stream reads a sample: a
# shape that ranks cannot share out would fail in the middle of a pass.


def stream_shape(
    world: int, global_batch: int | None, batch_size: int | None, lanes: int | None, stripes: int
) -> StreamShape:
    """Returns how many lanes there are, and each one's samples a step.

    Raises:
        ConfigurationError: not exactly one of `global_batch` and `batch_size` is given, or lanes do not fit it.
    """
    if (global_batch is None) == (batch_size is None):
        raise ConfigurationError(
            "give ElasticStream either global_batch_size= (samples a step, at any world size: the order depends on the seed"
            " alone) or batch_size= (samples a step and rank: the order depends on the worlds too)"
        )
    if global_batch is None:
        assert batch_size is not None  # one of them is given
        if lanes is not None or batch_size < 1:
            raise ConfigurationError(
                f"batch_size={batch_size}, lanes={lanes}: at least 1, and lanes go with global_batch_size"
            )
        return StreamShape(world, batch_size, stripes)
    slots = global_batch if lanes is None else lanes
    if global_batch < 1 or slots < 1 or global_batch % slots:
        raise ConfigurationError(f"global_batch_size={global_batch} in lanes={slots}: it must be a multiple of them")
    return StreamShape(slots, global_batch // slots, stripes)


def check_numbers(shape: StreamShape, window: int, pack: int | None, skip_bad: int, workers: int) -> None:
    """Raises ConfigurationError for numbers too small, or stripes no multiple of workers."""
    if window < 1 or (pack is not None and pack < 1) or skip_bad < 0 or shape.lane_groups < 1:
        raise ConfigurationError(
            f"shuffle_window={window}, sequence_length={pack}, max_bad_samples={skip_bad}: 1, 1 and 0 are the least"
        )
    if workers and shape.lane_groups % workers:
        raise ConfigurationError(
            f"lane_groups={shape.lane_groups} cannot be shared out among num_workers={workers}: give a multiple of them."
            " Stripes are part of the order and stay as they are; workers may be any divisor of them"
        )


def check_shards(kind: str, shards: Sequence[DataShard], lanes: int) -> None:
    """Raises ConfigurationError where a lane would have nothing to read."""
    known = all(shard.samples is not None for shard in shards)
    have, what = (
        (sum(shard.samples or 0 for shard in shards), "samples") if known else (len(shards), "shards of unknown length")
    )
    if have < lanes:
        raise ConfigurationError(
            f"{kind} has {have} {what}, and {lanes} lanes are to read it: each needs one. Give fewer lanes="
            " (or lane_groups=, or ranks where batch_size= is given), or divide the source into more shards"
        )


def grouping_of(
    max_tokens: int | None, max_samples: int | None, length: Callable[[Any], int], window: int, pack: int | None
) -> Grouping | None:
    """Returns how samples are grouped by length; None where they are not.

    Raises:
        ConfigurationError: a bound below 1, no window to group in, or packed rows too.
    """
    if max_tokens is None and max_samples is None:
        return None
    if min(1 if most is None else most for most in (max_tokens, max_samples)) < 1:
        raise ConfigurationError(f"max_tokens={max_tokens}, max_samples={max_samples}: 1 is the least")
    if window < 2 or pack is not None:
        raise ConfigurationError(
            f"groups of like length with shuffle_window={window}, sequence_length={pack}: they are cut out of windows of some hundred samples"
            " that are sorted (give shuffle_window=), and packed rows have one length already"
        )
    return Grouping(max_tokens, max_samples, length)


def as_sources(given: Any) -> list[DataSource]:
    """Returns one source or several as a list; none raises ConfigurationError."""
    found = list(given) if isinstance(given, list | tuple) else [given]
    if not found:
        raise ConfigurationError("ElasticStream was given no source")
    return found


def checked_weights(weights: Sequence[float] | None, sources: int) -> list[float]:
    """Returns a weight above 0 for each source; equal by default.

    Raises:
        ConfigurationError: another number of them, or one that is not above 0.
    """
    found = [1.0] * sources if weights is None else [float(weight) for weight in weights]
    if len(found) != sources or min(found) <= 0:
        raise ConfigurationError(f"weights={found} of {sources} sources: one for each, above 0")
    return found


# ---- stream ----------------------------------------------------------------------------------------------------------

_BAD = 3
"""The index, in a lane's plain numbers, of how many samples it left out."""


class ElasticStream:
    """`ElasticStream` serves batches of one or several sources in shards.

    `for batch in stream` is endless and continues at the stream's cursors. With `global_batch` a step takes as many
    samples at any world size, in an order that no world changes: the run with resizes has the loss curve of the
    undisturbed one. With `batch_size` each rank takes as many, so that a step of another world has another size; then
    each sample still comes once a pass, in an order that depends on the worlds.

    Its state is positions, not iterators, which no other world could share out. Lanes are MosaicML streaming's
    canonical nodes, `max_tokens` is fairseq's, `pack` the concatenation of GPT training.

    Args:
        sources: a source, or several that are mixed.
        global_batch_size: samples a step on all ranks together; `batch_size`, in its place, on each.
        weights: one for each source: how often its samples (or groups) are drawn.
        seed: what the order depends on.
        shuffle: whether shards come in another order each pass.
        shuffle_window: samples of one shard that are shuffled among each other; 1 for none.
        sequence_length: tokens a row: samples are rows of tokens, cut and joined to this length.
        max_tokens: groups samples of similar length, padded to no more tokens a group; a batch counts groups.
        max_samples: likewise, of no more samples; one of the two, or both. `batch.data` is a list of collated groups.
        length_fn: of a sample, as `transform` gives it, its tokens; by default `len`.
        lanes: readers that ranks share out, a divisor of the global batch; by default one for each of its samples.
        lane_groups: sets of lanes that are read in turn, a multiple of `num_workers`; by default as many, at least 1.
        max_bad_samples: up to how many bad samples of a rank's lanes are left out, in all.
        rank, num_replicas: of data parallelism; by default the process group's, else the launcher's.
        transform: called with a sample and its own generator: decoding, tokenising, augmentation.
        collate_fn: from a list of samples to `batch.data`; by default torch's, of packed rows one tensor.
        batches_per_step: how many batches one `step()` consumes.
        num_workers: processes that read ahead; 0: none.
        pin_memory, prefetch_factor, worker_init_fn: as torch's DataLoader has them.
        of_torch: other options of torch's DataLoader: refused, with what to give in their place.

    Raises:
        ConfigurationError: a number, rank or source that cannot be.
        DataError: a source cannot be read, or is not what it was.
    """

    shared_state_keys = ("checks", "left")
    """Keys of its state that the first rank tells for all, as they are large and alike."""

    def __init__(
        self,
        sources: DataSource | Sequence[DataSource],
        global_batch_size: int | None = None,
        *,
        batch_size: int | None = None,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_window: int = 1,
        sequence_length: int | None = None,
        max_tokens: int | None = None,
        max_samples: int | None = None,
        length_fn: Callable[[Any], int] | None = None,
        lanes: int | None = None,
        lane_groups: int | None = None,
        max_bad_samples: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        batches_per_step: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        **of_torch: Any,
    ) -> None:
        refuse_options("ElasticStream", of_torch)
        self._sources = as_sources(sources)
        self._weights = checked_weights(weights, len(self._sources))
        self.rank, self.num_replicas = checked_rank(rank, num_replicas)
        self.deterministic = global_batch_size is not None
        self.seed, self._shuffle, self._window = seed, shuffle, shuffle_window
        self._shards = [tuple(source.shards()) for source in self._sources]
        self._kinds = [type(source).__name__ for source in self._sources]
        self._identities = [identity_of(shards) for shards in self._shards]
        self._checked: list[str] | None = None
        self._lengths = [tuple(shard.samples for shard in shards) for shards in self._shards]
        self.shape = stream_shape(
            self.num_replicas, global_batch_size, batch_size, lanes, lane_groups or max(1, num_workers)
        )
        check_numbers(self.shape, shuffle_window, sequence_length, max_bad_samples, num_workers)
        self._left: list[UnconsumedRanges] = [{} for _ in self._sources]
        self._pack, self._skip_bad = sequence_length, max_bad_samples
        self._grouping = grouping_of(max_tokens, max_samples, length_fn or len, shuffle_window, sequence_length)
        self._prepare = None if transform is None else Transform(transform)
        self._collate = collate_fn or (stacked if sequence_length is not None else default_collate_function())
        self._options = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": worker_init_fn,
        }
        check_options(self._options)
        self._slots = self.shape.slots_of_rank(self.rank, self.num_replicas)
        self._cursors: dict[int, Sequence[int]] = {}
        """Of each lane: its number and cursor, as the state has it; nobody reads most of them."""
        self._batches = 0
        """Steps that were consumed before the state was loaded."""
        self._consumption = Consumption(batches_per_step)
        self._waiting: deque[tuple[int, LaneCursors]] = deque()
        """Of each batch from the first unconsumed one on: its number, and its lanes' cursors behind it."""
        self._newest: dict[int, LaneCursors] = {}
        """By first lane: cursors behind what was consumed that `_cursors` lacks."""
        self._unreported: list[LaneCursors] = []
        """Of batches consumed since the last step: their lanes' cursors behind them."""
        self.step_samples = 0
        """Samples (packed rows, or groups, where it makes them) of this rank that the last step consumed."""
        self._assignments_cache: list[LaneAssignment] | None = None
        """The dealings by which `passes` counts."""
        self._bad: dict[int, int] = {}
        self._iterator = 0
        for kind, shards in zip(self._kinds, self._shards, strict=True):
            check_shards(kind, shards, self.shape.lanes)

    def __iter__(self) -> Iterator[Batch]:
        self._iterator += 1
        mine = self._iterator
        number = self._consumption.begin()
        while self._waiting and self._waiting[-1][0] >= number:
            self._waiting.pop()
        cursors = dict(self._cursors_after_consumed())
        self._bad = {lane: plain[_BAD] for lane, plain in cursors.items() if plain[_BAD]}
        for _, told in self._waiting:
            cursors |= {plain[0]: plain for plain in told.plain()}
        for data, told, tokens in self._read(lanes_of_plain(cursors.values()), self._batches + number):
            if mine != self._iterator:
                raise StateMismatch(
                    "this iterator was made before the stream's state was restored, or before a newer iterator: what it"
                    " hands out is not what the stream counts. Call restore() first, then iter(stream), once"
                )
            self._waiting.append((number, told))
            number += 1
            self._consumption.count_yielded()
            if not self._consumption.by_step:
                self._advance_cursors()
                self._unreported.clear()  # nobody asks
            yield self._batch(data, told, tokens)
            self._consumption.announce_request()

    @property
    def batches_yielded(self) -> int:
        """The number of batches handed out so far, repeated ones included."""
        return self._consumption.batches_yielded

    @property
    def bad_samples_skipped(self) -> int:
        """Bad samples that this rank's lanes left out of consumed batches."""
        return sum(
            plain[_BAD]
            for lane, plain in self._cursors_after_consumed().items()
            if lane % self.shape.slots in self._slots
        )

    def consumed_epochs(self) -> list[float]:
        """Returns each source's passes completed by this rank's lanes, as fractions.

        Empty on a rank that has no lane.
        """
        cursors = lanes_of_plain(self._cursors_after_consumed().values())
        mine = self.shape.lanes_of(self._slots)
        if not mine:
            return []
        return [self._epochs_of(number, cursors, mine) for number in range(len(self._sources))]

    def token_weight(self, batch: Batch, total: int | None = None) -> float:
        """Returns the factor for the mean loss over this batch's tokens.

        For batches of groups: without it, ranks with few tokens count as much as ranks with many.

        Args:
            total: the sum of all ranks' `batch.tokens`. Without it they are all-reduced, so every rank must call this
                in each step, in the thread that trains: a prefetcher's collective would meet another rank's gradients.
                Raises ConfigurationError where several ranks have neither it nor a process group.
        """
        if total is None:
            total = batch.tokens if self.num_replicas == 1 else summed_over_ranks(batch.tokens)
        return token_weight(batch.tokens, self.num_replicas, total)

    def commit(self, batches: int = 1) -> None:
        """Counts the next `batches` handed out as trained on, as `ElasticLoader.commit`."""
        self._consumption.commit(batches)

    def count_by_step(self, before_batch: BeforeBatch | None = None) -> None:
        """Called by Checkpointer: makes `end_step` count what is consumed, and announces requests for batches."""
        self._batches += self._consumption.consumed
        self._cursors_after_consumed()
        self._waiting.clear()
        self._unreported.clear()
        self._consumption.count_by_step(before_batch)

    def end_step(self) -> tuple[tuple[int, int], ...] | None:
        """Called by Checkpointer: ends a step and returns its positions.

        Ranges `[start, stop)` that this rank's lanes gave, by their cursors; None without a global order.
        """
        self._consumption.end_step()
        self._advance_cursors()
        told, self._unreported = self._unreported, []
        self.step_samples = sum(map(len, told)) * self.shape.items_per_lane if self._slots else 0
        if not self.deterministic:
            return None
        return joined_spans(behind.span(self.shape) for behind in told) if self._slots else ()

    def skip_steps(self, steps: int) -> None:
        """Leaves out the batches of so many steps: reads over them."""
        number = steps * self._consumption.per_step
        cursors = dict(self._cursors_after_consumed())
        for _, told, _ in islice(self._read(lanes_of_plain(cursors.values()), self._batches), number):
            cursors |= {plain[0]: plain for plain in told.plain()}
        self._go_on(lanes_of_plain(cursors.values()), self._batches + number, self._left)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's cursors after the last consumed batch, and the order."""
        self._consumption.is_state_taken = True
        cursors = self._cursors_after_consumed()
        own = set(self.shape.lanes_of(self._slots))
        return {
            "order": self._order(),
            "sources": self._identities,
            # whoever has the first lane tells it in more detail, so that a shard can be named
            "checks": self._checks() if 0 in own else None,
            "batches": self._batches + self._consumption.consumed,
            "lanes": sorted(list(plain) for lane, plain in cursors.items() if lane in own),
            "shadow": sorted(list(plain) for lane, plain in cursors.items() if lane not in own),
            "left": encode_unconsumed(self._left, self._lengths) if 0 in own else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores this rank's own state, in a world of the same size.

        Raises StateMismatch where an argument that the order depends on, or a source, is not what it was.
        """
        check_state(state, self._order(), self._identities, self._kinds, self._shards)
        left = decode_unconsumed([state], self._lengths)
        self._go_on(lanes_of_plain([*state["lanes"], *state["shadow"]]), int(state["batches"]), left)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], rank: int, num_replicas: int) -> None:
        """Restores from all ranks' states, in a world of another size.

        `states` are the older world's, by rank. Raises StateMismatch as `load_state_dict`, and where `rank` and `world`
        are not the stream's or the states not of one checkpoint.
        """
        if (rank, num_replicas) != (self.rank, self.num_replicas):
            raise StateMismatch(
                f"the stream was built for rank {self.rank} of {self.num_replicas} and is restored as rank {rank} of {num_replicas}:"
                " give it rank= and num_replicas= of data parallelism, or neither"
            )
        for state in states:
            check_state(state, self._order(), self._identities, self._kinds, self._shards)
        if len({int(state["batches"]) for state in states}) > 1 and self.deterministic:
            raise StateMismatch("the ranks' states are of different steps: they are not of one checkpoint")
        cursors, batches = merge_states(states), int(states[0]["batches"])
        left = decode_unconsumed(states, self._lengths)
        if self.deterministic:
            self._go_on(cursors, batches, left)
            return
        older = StreamShape(len(states), self.shape.items_per_lane, self.shape.lane_groups)
        dealings = self._assignments(older.lanes, left)
        self._go_on({}, 0, [unconsumed_by_pass(dealing, cursors, number) for number, dealing in enumerate(dealings)])

    def _checks(self) -> list[str]:
        if self._checked is None:
            self._checked = [b64encode(checks_of(shards)).decode() for shards in self._shards]
        return self._checked

    def _go_on(self, cursors: Mapping[int, LaneCursor], batches: int, left: Sequence[UnconsumedRanges]) -> None:
        own = set(self.shape.lanes_of(self._slots or (0,)))
        kept = {lane: cursor for lane, cursor in cursors.items() if lane in own}
        self._cursors = {plain[0]: plain for plain in lanes_as_plain(kept)}
        self._batches, self._left, self._assignments_cache = batches, list(left), None
        self._waiting.clear()
        self._newest.clear()
        self._unreported.clear()
        self._consumption.reset_counts()
        self._iterator += 1

    def _advance_cursors(self) -> None:
        """Takes the cursors behind what was consumed; forgets the batches that were."""
        while self._waiting and self._waiting[0][0] < self._consumption.consumed:
            self._unreported.append(told := self._waiting.popleft()[1])
            self._newest[told.first] = told

    def _cursors_after_consumed(self) -> dict[int, Sequence[int]]:
        """Returns the lanes' cursors behind what was consumed."""
        self._advance_cursors()
        for told in self._newest.values():
            self._cursors |= {plain[0]: plain for plain in told.plain()}
        self._newest.clear()
        return self._cursors

    def _read(self, cursors: Mapping[int, LaneCursor], first: int) -> Iterator[Read]:
        recipe = Recipe(
            sources=self._sources,
            weights=self._weights,
            assignments=self._assignments(self.shape.lanes, self._left),
            shape=self.shape,
            window=self._window,
            pack=self._pack,
            grouping=self._grouping,
            prepare=self._prepare,
            collate=self._collate,
            skip_bad=self._skip_bad,
            seed=self.seed,
        )
        slots = self._slots or (0,)  # a rank without lanes takes part in the step's collectives, with weight 0
        if self._options["num_workers"] == 0 and not self._options["pin_memory"]:
            return read_in_process(recipe, slots, cursors, first)
        from surefoot.data.stream_workers import read_ahead

        return read_ahead(recipe, slots, cursors, first, self._options)

    def _batch(self, data: Any, told: LaneCursors, tokens: int) -> Batch:
        self._bad |= told.bad
        if self._bad and (bad := sum(self._bad.values())) > self._skip_bad:
            raise DataError(
                f"{bad} bad samples were left out by this rank's lanes, and max_bad_samples={self._skip_bad} allows no more: the"
                " log names each of them"
            )
        # of groups it is not known before ranks have added up their tokens: a loss that takes it shall be no number
        even = 1.0 if self._grouping is None or self.num_replicas == 1 else math.nan
        if not self.deterministic:
            return Batch(data, even, 0, 0, (), tokens)
        start, stop = told.span(self.shape)
        if not self._slots:
            return Batch(data, 0.0, start, start, ())
        return Batch(data, even * len(self._slots) * self.num_replicas / self.shape.slots, start, stop, (), tokens)

    def _assignments(self, lanes: int, left: Sequence[UnconsumedRanges]) -> list[LaneAssignment]:
        return make_assignments(self._lengths, (self.seed, self._shuffle), lanes, left)

    def _order(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "seed": self.seed,
            "shuffle": self._shuffle,
            "shuffle_window": self._window,
            "sequence_length": self._pack,
            "max_tokens": self._grouping.max_tokens if self._grouping else None,
            "max_samples": self._grouping.max_samples if self._grouping else None,
            "global_batch_size": shape.batch if self.deterministic else None,
            "batch_size": None if self.deterministic else shape.items_per_lane,
            "lanes": shape.slots if self.deterministic else None,
            "lane_groups": shape.lane_groups,
            "weights": list(self._weights),
        }

    def _epochs_of(self, number: int, cursors: Mapping[int, LaneCursor], lanes: Sequence[int]) -> float:
        if self._assignments_cache is None:
            self._assignments_cache = self._assignments(self.shape.lanes, self._left)
        dealing = self._assignments_cache[number]
        done = sum(dealing.epochs(lane, cursors[lane].sources[number]) for lane in lanes if lane in cursors)
        return done / len(lanes)
