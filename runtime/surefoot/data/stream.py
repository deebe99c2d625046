"""`ElasticStream`: batches of any source in shards, each sample once a pass, at any world size.

Used by training scripts. Of its state each rank saves its own lanes; a world of another size takes all of them over.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surefoot.data.consumption import Consumption
from surefoot.data.extents import Dealing, Left
from surefoot.data.lanes import LaneCursor
from surefoot.data.loader import Batch, default_collate_function
from surefoot.data.order import sample_seed
from surefoot.data.process_place import place_of_process
from surefoot.data.source import DataError, DataSource, changed_shard, checks_of, identity_of
from surefoot.data.stream_arguments import as_sources, check_numbers, checked_weights, stream_shape
from surefoot.data.stream_reading import Read, Recipe, read_here
from surefoot.data.stream_state import (
    StreamShape,
    joined_spans,
    lanes_as_plain,
    lanes_of_plain,
    left_as_plain,
    left_behind,
    left_of_plain,
    taken_over,
)
from surefoot.errors import ConfigurationError, StateMismatch

if TYPE_CHECKING:
    import torch


class ElasticStream:
    """Batches of one or several sources in shards.

    `for batch in stream` is endless and goes on from where it stands. With `global_batch` a step takes as many samples at any world size, and their order depends on the seed alone: the run
    with resizes has the loss curve of the undisturbed one. With `batch_size` each rank takes as many, so that a step of
    another world has another size; then each sample still comes once a pass, in an order that depends on the worlds.

    Args:
        sources: a source, or several that are mixed.
        global_batch: samples a step on all ranks together; `batch_size`, in its place, on each.
        weights: one for each source: how often its samples are drawn.
        seed: what the order depends on.
        shuffle: whether shards come in another order each pass.
        window: samples of one shard that are shuffled among each other; 1 for none.
        pack: tokens a row: samples are rows of tokens, cut and joined to this length.
        lanes: readers that ranks share out; by default one for each sample of the global batch, a multiple of them.
        stripes: sets of lanes that are read in turn, a multiple of `workers`; by default as many, at least 1.
        skip_bad: up to how many bad samples of a rank's lanes are left out.
        rank, world: of data parallelism; by default the process group's, else the launcher's.
        transform: called with a sample and its own generator: decoding, tokenising, augmentation.
        collate: from a list of samples to `batch.data`; by default torch's, of packed rows one tensor.
        batches_per_step: how many batches one `step()` consumes.
        workers: processes that read ahead; 0: none.
        pin_memory, prefetch_factor, worker_init_fn: as torch's DataLoader has them.

    Raises:
        ConfigurationError: a number, rank or source that cannot be.
        DataError: a source cannot be read, or is not what it was.
    """

    def __init__(
        self,
        sources: DataSource | Sequence[DataSource],
        global_batch: int | None = None,
        *,
        batch_size: int | None = None,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        window: int = 1,
        pack: int | None = None,
        lanes: int | None = None,
        stripes: int | None = None,
        skip_bad: int = 0,
        rank: int | None = None,
        world: int | None = None,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        batches_per_step: int | None = None,
        workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self._sources = as_sources(sources)
        self._weights = checked_weights(weights, len(self._sources))
        found = place_of_process()
        self.rank = found[0] if rank is None else rank
        self.world = found[1] if world is None else world
        if not 0 <= self.rank < self.world:
            raise ConfigurationError(f"rank {self.rank} of {self.world}: a rank is from 0 to world − 1")
        self.deterministic = global_batch is not None
        self.seed, self._shuffle, self._window = seed, shuffle, window
        self._shards = [tuple(source.shards()) for source in self._sources]
        self._identities = [identity_of(shards) for shards in self._shards]
        self._checked: list[str] | None = None
        self._lengths = [tuple(shard.samples for shard in shards) for shards in self._shards]
        self.shape = stream_shape(self.world, global_batch, batch_size, lanes, stripes or max(1, workers))
        check_numbers(self.shape, window, pack, skip_bad, workers)
        self._left: list[Left] = [{} for _ in self._sources]
        self._pack, self._skip_bad = pack, skip_bad
        self._prepare = None if transform is None else _Transform(transform)
        self._collate = collate or (_stacked if pack is not None else default_collate_function())
        self._options = {
            "num_workers": workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": worker_init_fn,
        }
        self._slots = self.shape.own(self.rank, self.world)
        self._cursors: dict[int, LaneCursor] = {}
        self._batches = 0
        """Steps that were consumed before the state was loaded."""
        self._consumption = Consumption(batches_per_step)
        self._waiting: deque[tuple[int, list[list[int]]]] = deque()
        """Of each batch from the first that is not consumed on: its number, and where its lanes stand behind it."""
        self._unreported: list[list[int]] = []
        """Of batches that were consumed since the last step: where their lanes stood behind them."""
        self.step_samples = 0
        """Samples (of packed data: rows) of this rank that the last step consumed."""
        self._dealt: list[Dealing] | None = None
        """What `passes` reckons with."""
        self._bad: dict[int, int] = {}
        self._iterator = 0
        self._check_shards()

    # ---- what a script calls ---------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        self._iterator += 1
        mine = self._iterator
        number = self._consumption.begin()
        while self._waiting and self._waiting[-1][0] >= number:
            self._waiting.pop()
        cursors = dict(self._settled())
        self._bad = {lane: cursor.bad for lane, cursor in cursors.items() if cursor.bad}
        for _, told in self._waiting:
            cursors |= lanes_of_plain(told)
        for data, told in self._read(cursors, self._batches + number):
            if mine != self._iterator:
                raise StateMismatch(
                    "this iterator was made before the stream's state was restored, or before a newer iterator: what it"
                    " hands out is not what the stream counts. Call restore() first, then iter(stream), once"
                )
            self._waiting.append((number, told))
            number += 1
            self._consumption.hand_out()
            yield self._batch(data, told)

    @property
    def handed_out(self) -> int:
        """How many batches were handed out."""
        return self._consumption.handed_out

    @property
    def skipped(self) -> int:
        """How many bad samples were left out by this rank's lanes."""
        return sum(cursor.bad for lane, cursor in self._settled().items() if lane % self.shape.slots in self._slots)

    def passes(self) -> list[float]:
        """Of each source: how many passes this rank's lanes have behind them, the share of the present one included.

        Empty on a rank that has no lane.
        """
        cursors = self._settled()
        mine = self.shape.lanes_of(self._slots)
        if not mine:
            return []
        return [self._passes_of(number, cursors, mine) for number in range(len(self._sources))]

    def commit(self, batches: int = 1) -> None:
        """Says that the next `batches` of those handed out have been trained on; from then on nothing else counts.

        For whoever takes batches in another thread, or looks at some. Raises ConfigurationError if there are not as many.
        """
        self._consumption.commit(batches)

    def count_by_step(self) -> None:
        """Called by Checkpointer: from here on batches are consumed by `step_ends`."""
        self._batches += self._consumption.consumed
        self._settled()
        self._waiting.clear()
        self._unreported.clear()
        self._consumption.count_by_step()

    def step_ends(self) -> tuple[tuple[int, int], ...] | None:
        """Called by Checkpointer at each step. Returns positions [start, stop) of what this rank's lanes gave for it.

        They follow from where the lanes stood, not from the number of the step. None without a global order.
        """
        self._consumption.step_ends()
        self._settled()
        told, self._unreported = self._unreported, []
        self.step_samples = len(told) * self.shape.per_lane if self._slots else 0
        if not self.deterministic:
            return None
        return joined_spans(self.shape.span(lane[0], lane[1]) for lane in told) if self._slots else ()

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's lanes stand behind the batch consumed last, and what the order depends on."""
        cursors = self._settled()
        own = set(self.shape.lanes_of(self._slots))
        return {
            "order": self._order(),
            "sources": self._identities,
            # whoever has the first lane tells it in more detail, so that a shard can be named
            "checks": self._checks() if 0 in own else None,
            "batches": self._batches + self._consumption.consumed,
            "lanes": lanes_as_plain({lane: cursor for lane, cursor in cursors.items() if lane in own}),
            "shadow": lanes_as_plain({lane: cursor for lane, cursor in cursors.items() if lane not in own}),
            "left": [left_as_plain(left, lengths) for left, lengths in zip(self._left, self._lengths, strict=True)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """This rank's own state, in a world of the same size."""
        self._check_state(state)
        left = [left_of_plain(p, lengths) for p, lengths in zip(state["left"], self._lengths, strict=True)]
        self._go_on(lanes_of_plain([*state["lanes"], *state["shadow"]]), int(state["batches"]), left)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], rank: int, world: int) -> None:
        """The states of all ranks of a world of another size: this one takes over its part of what they left."""
        if (rank, world) != (self.rank, self.world):
            raise StateMismatch(
                f"the stream was built for rank {self.rank} of {self.world} and is restored as rank {rank} of {world}:"
                " give it rank= and world= of data parallelism, or neither"
            )
        for state in states:
            self._check_state(state)
        if len({int(state["batches"]) for state in states}) > 1 and self.deterministic:
            raise StateMismatch("the ranks' states are of different steps: they are not of one checkpoint")
        cursors, batches = taken_over(states), int(states[0]["batches"])
        left = [left_of_plain(p, lengths) for p, lengths in zip(states[0]["left"], self._lengths, strict=True)]
        if self.deterministic:
            self._go_on(cursors, batches, left)
            return
        older = StreamShape(len(states), self.shape.per_lane, self.shape.stripes)
        dealings = self._dealings(older.lanes, left)
        self._go_on({}, 0, [left_behind(dealing, cursors, number) for number, dealing in enumerate(dealings)])

    # ---- how -------------------------------------------------------------------------------------------------------

    def _checks(self) -> list[str]:
        if self._checked is None:
            self._checked = [b64encode(checks_of(shards)).decode() for shards in self._shards]
        return self._checked

    def _go_on(self, cursors: Mapping[int, LaneCursor], batches: int, left: Sequence[Left]) -> None:
        own = set(self.shape.lanes_of(self._slots or (0,)))
        self._cursors = {lane: cursor for lane, cursor in cursors.items() if lane in own}
        self._batches, self._left, self._dealt = batches, list(left), None
        self._waiting.clear()
        self._unreported.clear()
        self._consumption.forget()
        self._iterator += 1

    def _settled(self) -> dict[int, LaneCursor]:
        """Where lanes stand behind what was consumed; forgets the batches that were."""
        while self._waiting and self._waiting[0][0] < self._consumption.consumed:
            told = self._waiting.popleft()[1]
            self._cursors |= lanes_of_plain(told)
            self._unreported += told
        return self._cursors

    def _read(self, cursors: Mapping[int, LaneCursor], first: int) -> Iterator[Read]:
        recipe = Recipe(
            sources=self._sources,
            weights=self._weights,
            dealings=self._dealings(self.shape.lanes, self._left),
            shape=self.shape,
            window=self._window,
            pack=self._pack,
            prepare=self._prepare,
            collate=self._collate,
            skip_bad=self._skip_bad,
            seed=self.seed,
        )
        slots = self._slots or (0,)  # a rank without lanes takes part in the step's collectives, with weight 0
        if self._options["num_workers"] == 0 and not self._options["pin_memory"]:
            return read_here(recipe, slots, cursors, first)
        from surefoot.data.stream_workers import read_ahead

        return read_ahead(recipe, slots, cursors, first, self._options)

    def _batch(self, data: Any, told: Sequence[Sequence[int]]) -> Batch:
        self._bad |= {lane[0]: lane[3] for lane in told if lane[3]}
        if (bad := sum(self._bad.values())) > self._skip_bad:
            raise DataError(
                f"{bad} bad samples were left out by this rank's lanes, and skip_bad={self._skip_bad} allows no more: the"
                " log names each of them"
            )
        if not self.deterministic:
            return Batch(data, 1.0, 0, 0, ())
        spans = [self.shape.span(lane[0], lane[1]) for lane in told]
        if not self._slots:
            return Batch(data, 0.0, spans[0][0], spans[0][0], ())
        weight = len(self._slots) * self.world / self.shape.slots
        return Batch(data, weight, spans[0][0], spans[-1][1], ())

    def _dealings(self, lanes: int, left: Sequence[Left]) -> list[Dealing]:
        return [
            Dealing(
                lengths,
                self.seed if number == 0 else sample_seed(self.seed, number),
                lanes,
                shuffled=self._shuffle,
                left=rest,
            )
            for number, (lengths, rest) in enumerate(zip(self._lengths, left, strict=True))
        ]

    def _order(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "seed": self.seed,
            "shuffle": self._shuffle,
            "window": self._window,
            "pack": self._pack,
            "global_batch": shape.batch if self.deterministic else None,
            "batch_size": None if self.deterministic else shape.per_lane,
            "lanes": shape.slots if self.deterministic else None,
            "stripes": shape.stripes,
            "weights": list(self._weights),
        }

    def _passes_of(self, number: int, cursors: Mapping[int, LaneCursor], lanes: Sequence[int]) -> float:
        if self._dealt is None:
            self._dealt = self._dealings(self.shape.lanes, self._left)
        dealing = self._dealt[number]
        done = sum(dealing.passes(lane, cursors[lane].sources[number]) for lane in lanes if lane in cursors)
        return done / len(lanes)

    # ---- what is refused -------------------------------------------------------------------------------------------

    def _check_shards(self) -> None:
        lanes = self.shape.lanes
        for source, shards, lengths in zip(self._sources, self._shards, self._lengths, strict=True):
            kind = type(source).__name__
            known = None not in lengths
            have, what = (
                (sum(n or 0 for n in lengths), "samples") if known else (len(shards), "shards of unknown length")
            )
            if have < lanes:
                raise ConfigurationError(
                    f"{kind} has {have} {what}, and {lanes} lanes are to read it: each needs one. Give fewer lanes="
                    " (or stripes=, or ranks where batch_size= is given), or divide the source into more shards"
                )

    def _check_state(self, state: Mapping[str, Any]) -> None:
        for name, mine in self._order().items():
            had = state["order"].get(name)
            if had != mine:
                raise StateMismatch(
                    f"the stream's {name} is {mine} and was {had} in the checkpoint: samples would be lost or repeated;"
                    " build the stream as before, or start anew"
                )
        for number, shards in enumerate(self._shards):
            if number >= len(state["sources"]) or state["sources"][number] != self._identities[number]:
                checks = state.get("checks")
                told = b64decode(checks[number]) if checks and number < len(checks) else b""
                changed = changed_shard(shards, told)
                which = (
                    f"shard {changed} of it is another"
                    if changed
                    else "its shards are others, or another number of them"
                )
                raise StateMismatch(
                    f"source {number} ({type(self._sources[number]).__name__}) is not what the checkpoint was made with:"
                    f" {which}. Bring the old data back, or begin another job with what is there now"
                )


class _Transform:
    """A transform as lanes call it."""

    def __init__(self, transform: Callable[[Any, torch.Generator], Any]) -> None:
        self._transform = transform

    def __call__(self, sample: Any, seed: int) -> Any:
        import torch

        generator = torch.Generator()
        generator.manual_seed(seed)
        return self._transform(sample, generator)


def _stacked(rows: list[Any]) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.stack(rows))
