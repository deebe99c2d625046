"""Tests of `data.loader`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.shards import Numbers
from surefoot.data import ElasticLoader, ElasticSampler, ElasticStream
from surefoot.errors import StateMismatch, StateNotRestorable
from surefoot.format.manifests import objects_of
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.save_state import tied_objects
from surefoot.protocol.identities import RankSave
from surefoot.state import Program, read_values

# ---- ownership -------------------------------------------------------------------------------------------------------
# Whose state an object's is: each rank's own comes back to it, shared ones agree, and nothing is divided by guess.


class Stream:
    """Like a loader over this rank's own shards: a place, and the state of a generator as torch gives it."""

    def __init__(self, shard: str, at: int = 0, seed: int = 0) -> None:
        self.shard, self.at = shard, at
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.at, 100))

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self.shard, "at": self.at, "generator": self.generator.get_state(), "x": torch.ones(2, 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shard, self.at = state["shard"], state["at"]
        self.generator.set_state(state["generator"])
        assert torch.equal(state["x"], torch.ones(2, 2))


class Meter:
    """Plain values, and a tensor that ranks share."""

    def __init__(self, mean: float) -> None:
        self.mean, self.average = mean, torch.full((3,), mean)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.average = state["mean"], state["average"]


class Divisible(Stream):
    """Says itself what becomes of all ranks' places in another world."""

    divided: Any = None

    def load_state_dicts(self, states: Sequence[Any], rank: int, world: int) -> None:
        self.divided = [s["at"] for s in states], rank, world
        assert all(isinstance(s["generator"], torch.Tensor) for s in states)


def saved(name: str, objects: Sequence[Any], **options: Any) -> list[bytes]:
    programs = [Program({name: o}, (rank, len(objects)), **options) for rank, o in enumerate(objects)]
    return [program.values(10) for program in programs]


def manifest(rank: int, values: bytes, world: int) -> RankManifest:
    made = RankManifest(RankSave(1, 10, rank), world, "i", "l", 0, 0, "d", 0, "v", len(values), 1.0, objects_of(values))
    again = RankManifest.from_json(made.to_json())
    assert again == made
    return again


def restored(subject: Any, name: str, blobs: list[bytes], where: tuple[int, int], **options: Any) -> list[str]:
    """As a rank does it; what was said."""
    program = Program({name: subject}, where, **options)
    rank, world = where
    told: list[str] = []
    if world != len(blobs):
        tied = tied_objects(manifest(r, b, len(blobs)) for r, b in enumerate(blobs))
        told = program.divide(tied, len(blobs), lambda n: [read_values(b)["parts"][n] for b in blobs])
    own = read_values(blobs[rank]) if world == len(blobs) else None
    shared = read_values(blobs[0])
    program.prepare(shared, own, {})
    program.apply(10, shared, own)
    return told


@pytest.mark.parametrize("local", [(), ("loader",)])
def test_each_rank_gets_its_own_place_back(local: tuple[str, ...]) -> None:
    blobs = saved("loader", [Stream("a", 17, seed=1), Stream("b", 23, seed=2)], local=local)
    for rank, (shard, at) in enumerate((("a", 17), ("b", 23))):
        back = Stream("new")
        restored(back, "loader", blobs, (rank, 2), local=local)
        assert (back.shard, back.at) == (shard, at)
        expected = torch.rand(3, generator=torch.Generator().manual_seed(rank + 1))
        assert torch.equal(torch.rand(3, generator=back.generator), expected)


def test_a_loaders_small_tensors_lie_in_no_layout() -> None:
    assert Program({"loader": Stream("a")}, (0, 2)).entries() == []


@pytest.mark.parametrize("name", ["loader", "data"])
@pytest.mark.parametrize("local", [False, True])
def test_a_world_of_another_size_is_refused_with_the_ways_out(name: str, local: bool) -> None:
    options: dict[str, Any] = {"local": (name,)} if local else {}
    blobs = saved(name, [Stream("a", 17), Stream("b", 23)], **options)
    assert tied_objects(manifest(r, b, 2) for r, b in enumerate(blobs)) == (name,)
    with pytest.raises(
        StateMismatch, match=rf"{name} \(Stream\).*of 2 ranks and this world has 1.*ElasticLoader.*reset_on_resize"
    ):
        restored(Stream("new"), name, blobs, (0, 1), **options)


def test_what_may_begin_anew_does_so_in_another_world_and_says_it() -> None:
    blobs = saved("loader", [Stream("a", 17), Stream("b", 23)], anew=("loader",))
    assert tied_objects(manifest(r, b, 2) for r, b in enumerate(blobs)) == ()
    back = Stream("new")
    (told,) = restored(back, "loader", blobs, (0, 1), anew=("loader",))
    assert back.shard == "new"
    assert "loader (Stream) begins anew" in told
    back = Stream("new")
    assert restored(back, "loader", blobs, (1, 2), anew=("loader",)) == []
    assert back.shard == "b", "at the same size nothing is given away"


def test_an_object_that_divides_states_gets_those_of_all_ranks() -> None:
    blobs = saved("loader", [Divisible("a", 17), Divisible("b", 23), Divisible("c", 5)])
    assert tied_objects(manifest(r, b, 3) for r, b in enumerate(blobs)) == ()
    back = Divisible("new")
    assert restored(back, "loader", blobs, (1, 2)) == []
    assert back.divided == ([17, 23, 5], 1, 2)
    back = Divisible("new")
    restored(back, "loader", blobs, (2, 3))
    assert (back.shard, back.divided) == ("c", None)


def test_what_the_first_rank_tells_for_all_comes_back_to_each_at_the_same_size() -> None:
    class Told(Divisible):
        shared_state_keys = ("left",)

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "left": self.shard if self.at == 17 else None}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.left = state["left"]
            super().load_state_dict(state)

    blobs = saved("loader", [Told("a", 17), Told("b", 23)])
    back = Told("new")
    restored(back, "loader", blobs, (1, 2))
    assert (back.shard, back.at, back.left) == ("b", 23, "a")


def test_values_that_agree_are_shared_at_any_size_and_others_are_not_given_away() -> None:
    alike, unlike = saved("meter", [Meter(2.0), Meter(2.0)]), saved("meter", [Meter(2.0), Meter(3.0)])
    assert tied_objects(manifest(r, b, 2) for r, b in enumerate(alike)) == ()
    assert tied_objects(manifest(r, b, 2) for r, b in enumerate(unlike)) == ("meter",)
    program = Program({"meter": Meter(0.0)}, (0, 3))
    assert program.divide((), 2, lambda _: []) == []
    with pytest.raises(
        StateMismatch, match=r"meter \(Meter\) did not have the same values on all ranks.*reset_on_resize"
    ):
        program.divide(("meter",), 2, lambda _: [])
    assert Program({"meter": Meter(0.0)}, (0, 3), ("meter",)).divide(("meter",), 2, lambda _: [])
    assert Program({"meter": Meter(0.0)}, (0, 3), anew=("meter",)).divide(("meter",), 2, lambda _: [])


def test_tensors_that_ranks_share_may_differ_and_tie_nothing() -> None:
    unlike = [Meter(2.0), Meter(2.0)]
    unlike[1].average += 1.0  # as BatchNorm's statistics in an averaged model do
    assert tied_objects(manifest(r, b, 2) for r, b in enumerate(saved("ema", unlike))) == ()


def test_an_elastic_loader_ties_nothing_and_a_generator_does_where_it_differs() -> None:
    loaders = [ElasticLoader(range(8), 2, rank=rank, num_replicas=2) for rank in range(2)]
    assert tied_objects(manifest(r, b, 2) for r, b in enumerate(saved("loader", loaders))) == ()

    class Random:
        def __init__(self, seed: int) -> None:
            self.generator = torch.Generator().manual_seed(seed)

        def state_dict(self) -> dict[str, Any]:
            return {"state": self.generator.get_state()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.generator.set_state(state["state"])

    blobs = saved("noise", [Random(1), Random(2)])
    assert tied_objects(manifest(r, b, 2) for r, b in enumerate(blobs)) == ("noise",)
    back = Random(9)
    restored(back, "noise", blobs, (1, 2))
    assert torch.equal(back.generator.get_state(), torch.Generator().manual_seed(2).get_state())


def test_a_loader_whose_state_is_that_of_something_it_lacks_is_refused_in_words() -> None:
    class Prepared(Stream):
        def state_dict(self) -> dict[str, Any]:
            raise AttributeError("'DataLoader' object has no attribute 'dl_state_dict'")

    with pytest.raises(StateNotRestorable, match=r"a Prepared has state_dict.*use_stateful_dataloader=True"):
        Program({"loader": Prepared("a")}, (0, 1)).entries()


def test_a_manifest_of_an_older_writer_ties_nothing() -> None:
    assert objects_of(b'{"format":1,"values":{"step":3}}') == ()
    assert tied_objects([manifest(0, b"{}", 2), manifest(1, b"{}", 2)]) == ()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.bfloat16),
        torch.empty(0),
        torch.tensor(2.5),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([True]),
    ],
)
def test_small_tensors_come_back_as_they_were(tensor: torch.Tensor) -> None:
    from surefoot.state.objects import InlinedTensors

    class Holder:
        def __init__(self) -> None:
            key = "\x00tensor of a rank"
            self.state: Any = {key: 1, "of": [{"deep": (tensor,)}], "alone": {key: 5}}

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    holder = Holder()
    inlined = InlinedTensors(holder, "own")
    program = Program({"loader": holder}, (0, 1))
    plain = read_values(program.values(1))["parts"]["loader"]
    before = holder.state
    inlined.load_state_dict(plain)
    back = holder.state["of"][0]["deep"][0]
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)
    assert {**holder.state, "of": 0} == {**before, "of": 0}


class Begins:
    """As torchdata's nodes do: asked for its state it begins to iterate, and one that it is given later is for the next time."""

    def __init__(self) -> None:
        self.at = 0
        self.began = False

    def __iter__(self) -> Iterator[int]:
        self.began = True
        while True:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        self.began = True
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not self.began:
            self.at = state["at"]


def test_a_loader_is_given_its_state_before_it_is_asked_for_it() -> None:
    read = Begins()
    next(iter(read))
    resumed = Begins()
    restored(resumed, "loader", saved("loader", [read]), (0, 1))
    assert next(iter(resumed)) == 2


# ---- skipped steps ---------------------------------------------------------------------------------------------------
# What a rollback has loaders leave out: exactly the batches of so many steps, at any world size, and no others.

Build = Callable[[int, int], Any]


def _loader(rank: int, world: int) -> ElasticLoader:
    return ElasticLoader(range(50), 6, seed=3, rank=rank, num_replicas=world, collate_fn=list)


def _lists(rank: int, world: int) -> ElasticLoader:
    lists = [[n, n + 1] if n % 3 else [n, n + 1, n + 2] for n in range(40)]
    return ElasticLoader(range(50), batch_sampler=lists, rank=rank, num_replicas=world, collate_fn=list)


def _stream(rank: int, world: int) -> ElasticStream:
    return ElasticStream(
        Numbers((9, 7, 8, 5)), 6, lanes=3, seed=3, shuffle_window=4, rank=rank, num_replicas=world, collate_fn=list
    )


def _restored(build: Build, world: int, steps: int, skip: int) -> list[Any]:
    """Loaders of a world that restores what one rank saved after `steps`, skips, and goes on."""
    one = build(0, 1)
    one.count_by_step()
    for _ in islice(one, steps):
        one.end_step()
    made = [build(rank, world) for rank in range(world)]
    for rank, loader in enumerate(made):
        if steps and world > 1 and hasattr(loader, "load_state_dicts"):
            loader.load_state_dicts([one.state_dict()], rank, world)
        elif steps:
            loader.load_state_dict(one.state_dict())
        loader.count_by_step()
        loader.skip_steps(skip)
    return made


@pytest.mark.parametrize("build", [_loader, _lists, _stream])
@settings(max_examples=30, deadline=None)
@given(world=st.integers(1, 3), steps=st.integers(0, 12), skip=st.integers(0, 12))
def test_the_run_goes_on_behind_what_is_left_out(build: Build, world: int, steps: int, skip: int) -> None:
    whole = [sorted(batch.data) for batch in islice(build(0, 1), steps + skip + 3)][steps + skip :]
    parts = [
        [list(batch.data) if batch.weight else [] for batch in islice(one, 3)]
        for one in _restored(build, world, steps, skip)
    ]
    assert [sorted(x for part in parts for x in part[n]) for n in range(3)] == whole


def test_a_step_of_several_batches_leaves_out_as_many() -> None:
    sampler = ElasticSampler(50, 4, seed=3, rank=0, num_replicas=1, batches_per_step=3)
    sampler.skip_steps(2)
    assert sampler.position == 24


def test_what_is_saved_behind_it_has_the_place_behind_it() -> None:
    loader = _loader(0, 1)
    loader.skip_steps(5)
    assert loader.state_dict()["position"] == 30
