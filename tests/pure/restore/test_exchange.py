"""Who reads what for whom, and an exchange among threads: any damage, loss or disagreement ends in direct reads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes.fake_tiers import MemoryPlace
from support.fakes.near_peers import Room
from support.saves import arrays, put_save, split, stream_of
from surefoot import metrics
from surefoot.errors import TierUnavailable, Unreadable
from surefoot.geometry import Box
from surefoot.geometry.sharding import Grid
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.restore import CheckpointReader, Destination, ReadOptions, ReadSummary, SaveSource, read_catalogue
from surefoot.restore.exchange import _FRAME, HEADER_BYTES, ROUND_BYTES, CommonDestinations, ExchangeFailed, Outbox
from surefoot.restore.read_plan import (
    ReadProposal,
    WantedBox,
    derive_agreement,
    divide_reads,
    group_shared_destinations,
    sharing_group_of,
)

reads_of_any_size = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4_000_000)), max_size=60)
CHECKPOINT = Checkpoint(1, 10)


# ---- who reads what --------------------------------------------------------------------------------------------------


@given(reads_of_any_size, st.integers(1, 8))
def test_a_division_gives_each_read_to_one_member_and_none_over_one_read_more_than_another(
    reads: list[tuple[int, int]], members: int
) -> None:
    owners = divide_reads(reads, [frozenset()] * members)
    assert len(owners) == len(reads)
    assert all(0 <= owner < members for owner in owners)
    loads = [sum(size for (_, size), o in zip(reads, owners, strict=True) if o == m) for m in range(members)]
    assert max(loads) - min(loads) <= max((size for _, size in reads), default=0)


@given(reads_of_any_size, st.lists(st.frozensets(st.integers(0, 5)), min_size=1, max_size=6))
def test_what_lies_in_a_members_staging_memory_is_read_by_one_that_has_it(
    reads: list[tuple[int, int]], staged: list[frozenset[int]]
) -> None:
    for (rank, _), owner in zip(reads, divide_reads(reads, staged), strict=True):
        assert rank in staged[owner] or all(rank not in mine for mine in staged)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=90, unique=True), st.integers(2, 20))
def test_members_of_a_part_agree_on_it_and_parts_are_of_nearly_equal_size(ranks: list[int], most: int) -> None:
    parts = {rank: sharing_group_of(sorted(ranks), rank, most) for rank in ranks}
    assert all(parts[other] == mine for mine in parts.values() for other in mine)
    assert sorted(rank for part in set(parts.values()) for rank in part) == sorted(ranks)
    sizes = {len(part) for part in parts.values()}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= most


def want(name: str, length: int) -> WantedBox:
    return WantedBox(name, "float32", (length,), Box((0,), (length,)), 4)


def test_groups_are_what_all_members_hold_by_name_and_small_ones_are_left_out() -> None:
    wanted = [want("b", 100), want("a", 100), want("mine", 500), want("pair", 50), want("few", 2)]
    everybody, pair, odd = Grid.world_size(4), Grid.of([1, 3]), Grid.of([1, 2])
    same = [everybody, everybody, Grid.alone(1), pair, odd]
    found = group_shared_destinations(wanted, same, rank=1, min_bytes=100)
    assert [(g.members, g.destination_indexes, g.size_bytes) for g in found] == [
        ((0, 1, 2, 3), (1, 0), 800),
        ((1, 3), (3,), 200),
    ]
    assert group_shared_destinations(wanted, same, rank=0, min_bytes=100)[0].members == (0, 1, 2, 3)
    assert group_shared_destinations(wanted, [None] * 5, rank=1, min_bytes=0) == ()


def test_ranks_take_groups_in_one_order_so_that_no_two_wait_for_each_other() -> None:
    """Of any two groups that two ranks share, both take the same one first."""
    rows, columns, everybody = [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1, 2, 3)]
    orders = []
    for rank in range(4):
        mine = [g for g in [*columns, *everybody, *rows] if rank in g]
        wanted = [want(f"t{i}", 10) for i in range(len(mine))]
        orders.append([g.members for g in group_shared_destinations(wanted, [Grid.of(g) for g in mine], rank, 0)])
    for one in orders:
        for other in orders:
            both = [g for g in one if g in other]
            assert both == [g for g in other if g in one]


@pytest.mark.parametrize(
    ("texts", "doubt", "reason"),
    [
        ([ReadProposal("p").to_text(), "withdrawn"], True, "1 of 2 members read alone"),
        ([ReadProposal("p").to_text(), '{"plan": "p"}'], True, "1 of 2 members read alone"),
        ([ReadProposal("p").to_text(), ReadProposal("q").to_text()], True, "different reads"),
        ([ReadProposal("p", (0, 1)).to_text(), ReadProposal("p", (0, 1)).to_text()], False, "staging memory"),
    ],
)
def test_cards_that_do_not_fit_together_mean_that_everybody_reads_alone(
    texts: list[str], doubt: bool, reason: str
) -> None:
    found = derive_agreement([ReadProposal.from_text(t) for t in texts], [(0, 10), (1, 10)])
    assert found.owners is None
    assert found.is_inconsistent == doubt
    assert reason in found.reason


def test_cards_that_fit_divide_the_reads_by_what_is_staged() -> None:
    cards = [ReadProposal.from_text(ReadProposal("p", staged).to_text()) for staged in ((1,), (0,))]
    assert derive_agreement(cards, [(0, 10), (1, 10)]).owners == (1, 0)


# ---- the outbox ------------------------------------------------------------------------------------------------------


def test_a_thread_that_finds_no_room_waits_for_the_next_buffer_and_nothing_is_lost() -> None:
    outbox = Outbox(_FRAME.size * 2 + 20)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(lambda: [outbox.queue_segment(n, 0, memoryview(bytes([n] * 10))) for n in range(5)])
        found = [bytes(outbox.next_full_buffer().data) for _ in range(2)]
        putting.result(10)
    outbox.mark_finished(failed=False)
    last = outbox.next_full_buffer()
    found.append(bytes(last.data))
    assert last.is_last
    assert not last.is_failed
    assert b"".join(found) == b"".join(_FRAME.pack(n, 0, 10) + bytes([n] * 10) for n in range(5))


def test_a_closed_outbox_holds_nobody_up() -> None:
    outbox = Outbox(_FRAME.size + 10)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(lambda: [outbox.queue_segment(n, 0, memoryview(bytes(10))) for n in range(5)])
        outbox.next_full_buffer()
        outbox.close()
        putting.result(10)


def test_any_segment_fits_into_a_buffer() -> None:
    Outbox(ROUND_BYTES).queue_segment(0, 0, memoryview(bytes(MAX_CHUNK_BYTES)))


# ---- an exchange -----------------------------------------------------------------------------------------------------

SHAPES = {"a": (400, 300), "b": (90, 70), "c": (5,), "d": ()}


@pytest.fixture(scope="module")
def place() -> MemoryPlace:
    """Three ranks' saves of replicated tensors, in many chunks."""
    made = MemoryPlace("memory:one")
    tensors = arrays(1, SHAPES)
    for rank in range(3):
        boxes = {name: split(shape, 3, rank) for name, shape in SHAPES.items()}
        put_save(made.tier(), RankSave(1, 10, rank), 3, *stream_of(tensors, boxes, chunk_blocks=2))
    return made


Result = tuple[ReadSummary, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Staged:
    stream: memoryview
    layout_digest: str
    is_own: bool = True


def member(
    place: MemoryPlace, room: Room, me: int, left_out: str = "", staged: dict[int, Staged] | None = None
) -> Result:
    """What one member restores, reading with all others what they all want."""
    into = {name: np.zeros(shape, "float32") for name, shape in SHAPES.items() if name != left_out}
    goals = [
        Destination(n, "float32", a.shape, Box.whole(a.shape), memoryview(a.reshape(-1).view(np.uint8)))
        for n, a in into.items()
    ]
    source = SaveSource(place.name, "memory", place.tier)
    options = ReadOptions(reader_rank=me, max_threads=2, patience_seconds=1.0)
    with CheckpointReader(CHECKPOINT, read_catalogue([source]), options, staged) as reader:
        return reader.read(goals, [CommonDestinations(tuple(range(len(goals))), room.member(me))]), into


def together(place: MemoryPlace, room: Room, **options: str) -> list[Result]:
    with ThreadPoolExecutor(room.count) as pool:
        return [f.result(30) for f in [pool.submit(member, place, room, m, **options) for m in range(room.count)]]


def assert_exact(results: list[Result]) -> None:
    wanted = arrays(1, SHAPES)
    for _, found in results:
        assert all(np.array_equal(found[name], wanted[name]) for name in found)


def fallbacks(reason: str) -> float:
    return metrics.restore_fallbacks.labels(reason)._value.get()


STATE_BYTES = sum(a.nbytes for a in arrays(1, SHAPES).values())


def test_each_stored_byte_is_read_once_for_all_members_and_all_have_every_byte(place: MemoryPlace) -> None:
    results = together(place, Room(4))
    assert_exact(results)
    assert sum(done.bytes_by_kind["memory"] for done, _ in results) == STATE_BYTES
    assert all(done.bytes_by_kind["memory"] + done.bytes_by_kind["peer"] == STATE_BYTES for done, _ in results)
    assert {done.source for done, _ in results} == {"memory"}


def test_members_that_start_where_they_saved_read_no_holder_at_all(place: MemoryPlace) -> None:
    """Each has its own save in staging memory, and gets the others' from them; one of them was written to since."""
    saves = {}
    for rank in range(3):
        boxes = {name: split(shape, 3, rank) for name, shape in SHAPES.items()}
        stream, data = stream_of(arrays(1, SHAPES), boxes, chunk_blocks=2)
        saves[rank] = Staged(memoryview(data), stream.digest)
    results = staged_together(place, saves)
    assert_exact(results)
    assert all("memory" not in done.bytes_by_kind for done, _ in results)
    assert {done.source for done, _ in results} == {"staging"}
    changed = bytearray(saves[1].stream)
    changed[5] ^= 1
    results = staged_together(place, saves | {1: Staged(memoryview(changed), saves[1].layout_digest)})
    assert_exact(results)
    assert {done.source for done, _ in results} == {"staging+memory"}


def staged_together(place: MemoryPlace, saves: dict[int, Staged]) -> list[Result]:
    room = Room(len(saves))
    with ThreadPoolExecutor(room.count) as pool:
        runs = [pool.submit(member, place, room, rank, "", {rank: save}) for rank, save in saves.items()]
        return [run.result(30) for run in runs]


@pytest.mark.gate_only
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 4), st.booleans())
def test_a_damaged_byte_anywhere_in_the_exchange_is_never_placed(
    place: MemoryPlace, at: int, members: int, header: bool
) -> None:
    spoiled: list[int] = []

    def spoil(me: int, source: int, data: memoryview) -> None:
        if (me, source) == (0, 1) and (data.nbytes == HEADER_BYTES) == header and not spoiled:
            data[at % data.nbytes] ^= 1 << at % 8
            spoiled.append(at)

    before = fallbacks("peer") + fallbacks("exchange")
    results = together(place, Room(members, spoil=spoil))
    assert_exact(results)
    assert spoiled
    assert fallbacks("peer") + fallbacks("exchange") > before
    assert results[0][0].bytes_by_kind["memory"] > STATE_BYTES // members


def _lost(me: int, source: int, data: memoryview) -> None:
    if me == 0 and data.nbytes > HEADER_BYTES:
        raise ExchangeFailed("the line broke")


def _nonsense(me: int, source: int, data: memoryview) -> None:
    if source == 0 and data.nbytes == HEADER_BYTES:
        data[:] = b"\xff" * HEADER_BYTES


@pytest.mark.parametrize("spoil", [_lost, _nonsense], ids=["a member is lost", "a header is nonsense"])
def test_a_broken_exchange_ends_in_direct_reads_of_what_is_missing(
    place: MemoryPlace, spoil: Callable[[int, int, memoryview], None]
) -> None:
    before = fallbacks("exchange")
    results = together(place, Room(3, spoil=spoil))
    assert_exact(results)
    assert fallbacks("exchange") >= before + 2
    assert all(sum(done.bytes_by_kind.values()) >= STATE_BYTES for done, _ in results)


def test_members_that_want_different_things_read_alone(place: MemoryPlace) -> None:
    before = fallbacks("exchange")
    room = Room(2)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(member, place, room, 0), pool.submit(member, place, room, 1, "b")]
        results = [run.result(30) for run in runs]
    assert_exact(results)
    assert fallbacks("exchange") == before + 2
    assert results[0][0].bytes_by_kind == {"memory": STATE_BYTES}


def test_a_member_whose_share_cannot_be_read_fails_alone_and_says_so() -> None:
    """The others come to the same end by themselves, since they need those bytes too; nobody waits."""
    tensors = arrays(1, SHAPES)
    spoiled = MemoryPlace("memory:two")
    for rank in range(3):
        boxes = {name: split(shape, 3, rank) for name, shape in SHAPES.items()}
        put_save(spoiled.tier(), RankSave(1, 10, rank), 3, *stream_of(tensors, boxes, chunk_blocks=2))
    spoiled.flip(RankSave(1, 10, 1), 0)
    room = Room(2)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(member, spoiled, room, m) for m in range(2)]
        for run in runs:
            with pytest.raises((Unreadable, TierUnavailable)):
                run.result(30)
