"""Loaders in turns: whose CPU time is whose, and what is said of the turns."""

from __future__ import annotations

from collections.abc import Iterator

from bench.loading_turns import Reader, Turn, alternated, summed_up


class Clocked(Reader):
    """A reader whose workers' clock counts what was taken, two batches late, as of what is loaded ahead."""

    taken = 0

    def take(self, batches: int) -> Turn:
        type(self).taken += batches
        return Turn(2.0, 1.0)

    def workers_cpu(self) -> float:
        return float(type(self).taken)


def batches() -> Iterator[int]:
    yield from range(1000)


def test_a_turns_cpu_is_the_process_and_what_its_workers_did_until_its_next_turn() -> None:
    found = alternated({"one": Clocked(batches(), ())}, 10, 3)
    assert found == {"one": [Turn(2.0, 11.0)] * 3}


def test_each_round_has_every_reader_once_and_not_always_the_same_first() -> None:
    order: list[str] = []

    class Noted(Reader):
        def take(self, batches: int) -> Turn:
            order.append(f"{next(self.batches)}")
            return Turn(1.0, 1.0)

    alternated({name: Noted(iter([name] * 9), ()) for name in "abc"}, 1, 9)  # type: ignore[arg-type]
    rounds = ["".join(order[number : number + 3]) for number in range(0, 27, 3)]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert {one[0] for one in rounds} == {"a", "b", "c"}


def test_a_reader_takes_its_batches_and_knows_its_own_workers() -> None:
    reader = Reader.begun(batches)
    assert reader.workers == ()
    turn = reader.take(5)
    assert next(reader.batches) == 6
    assert turn.wall > 0
    assert reader.workers_cpu() == 0


def test_a_ratio_is_of_turns_side_by_side_and_one_slow_turn_moves_no_median() -> None:
    theirs = [Turn(1.0, 2.0), Turn(1.0, 2.0), Turn(9.0, 9.0)]
    found = summed_up({"torch": theirs, "ours": [Turn(2.0, 2.0)] * 3}, "torch", 4)
    assert found["torch"]["samples_per_second"]["median"] == 4
    assert found["ours"]["ratio"]["median"] == 0.5
    assert found["ours"]["cpu_ratio"]["median"] == 1.0
    assert "ratio" not in found["torch"]


def test_undisturbed_is_what_a_tenth_of_the_turns_keep_below() -> None:
    theirs = [Turn(1.0, cpu) for cpu in (2.0, 2.0, 2.0, 8.0, 8.0)]
    ours = [Turn(1.0, cpu) for cpu in (2.5, 2.5, 2.5, 2.5, 2.5)]
    assert summed_up({"torch": theirs, "ours": ours}, "torch", 4)["ours"]["undisturbed_cpu_ratio"] == 0.8
