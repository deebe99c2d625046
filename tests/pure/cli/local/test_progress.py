"""Samples and losses are counted along the history that was kept, each step once."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.loader import ElasticLoader
from surefoot.protocol.checkpoints.completeness import Lineage, LineageEntry, first_own_step
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import SkippedData
from surefoot_operator.cli.local import progress
from surefoot_operator.cli.local.progress import LedgerEntry

BATCH = 6
LINEAGE: Lineage = (
    LineageEntry(1, None, 3),
    LineageEntry(2, Checkpoint(1, 4), 2),
    LineageEntry(4, Checkpoint(2, 6), 3),
)


def run_of(epoch: int, world: int, first: int, last: int) -> list[LedgerEntry]:
    """What `world` ranks write for steps first to last when each takes its exact share."""
    share = BATCH // world
    return [
        LedgerEntry(
            epoch,
            step,
            rank,
            1.0 / step,
            (((step - 1) * BATCH + rank * share, (step - 1) * BATCH + (rank + 1) * share),),
            0.0,
        )
        for step in range(first, last + 1)
        for rank in range(world)
    ]


# epoch 1 ran to step 5 and lost it; epoch 2 ran to 6; epoch 4 finished
HISTORY = run_of(1, 3, 1, 5) + run_of(2, 2, 5, 6) + run_of(4, 3, 7, 9)


def test_a_step_that_was_lost_and_run_again_counts_once() -> None:
    found = progress.count_samples(progress.counted_lines(HISTORY, LINEAGE))
    assert found == progress.SampleAccount(9, BATCH, lost=0, repeated=0)


def test_a_rank_that_never_reported_its_share_is_lost_samples() -> None:
    lines = [line for line in HISTORY if (line.generation, line.step, line.rank) != (4, 8, 1)]
    found = progress.count_samples(progress.counted_lines(lines, LINEAGE))
    assert found is not None
    assert (found.lost, found.repeated) == (2, 0)


def test_a_line_that_was_not_written_is_unknown_and_nothing_is_lost_for_it() -> None:
    lines = [line for line in HISTORY if line.generation != 4 or line.step != 8 or line.rank == 0]
    kept = progress.counted_lines(lines, LINEAGE)
    ranks = progress.world_size_by_step(kept, LINEAGE)
    assert ranks == {1: 3, 2: 3, 3: 3, 4: 3, 5: 2, 6: 2, 7: 3, 8: 3, 9: 3}
    found = progress.count_samples(kept, ranks=ranks)
    assert found is not None
    assert (found.lost, found.repeated, found.unknown) == (0, 0, 4)


def test_a_step_of_which_nobody_wrote_a_line_is_unknown() -> None:
    kept = progress.counted_lines([line for line in HISTORY if line.step != 7], LINEAGE)
    found = progress.count_samples(kept, ranks=progress.world_size_by_step(kept, LINEAGE))
    assert found is not None
    assert (found.lost, found.unknown, found.missing_steps) == (0, BATCH, (7,))


def test_a_share_that_was_reported_too_small_is_lost_whoever_else_wrote() -> None:
    lines = [line for line in HISTORY if (line.generation, line.step, line.rank) != (4, 8, 1)]
    lines.append(LedgerEntry(4, 8, 1, 1.0, ((7 * BATCH + 2, 7 * BATCH + 3),), 0.0))
    kept = progress.counted_lines(lines, LINEAGE)
    found = progress.count_samples(kept, ranks=progress.world_size_by_step(kept, LINEAGE))
    assert found is not None
    assert (found.lost, found.unknown) == (1, 0)


def test_a_run_that_was_ended_in_the_middle_of_a_step_counts_up_to_the_last_whole_one() -> None:
    lines = [line for line in HISTORY if line.step < 9 or line.rank == 0]
    kept = progress.counted_lines(lines, LINEAGE)
    ranks = progress.world_size_by_step(kept, LINEAGE)
    found = progress.count_samples(progress.drop_unfinished(kept, ranks), ranks=ranks)
    assert found == progress.SampleAccount(8, BATCH, lost=0, repeated=0)


def test_a_share_that_two_ranks_took_is_repeated_and_what_it_displaced_is_lost() -> None:
    wrong = LedgerEntry(4, 9, 0, 1.0, ((8 * BATCH + 2, 8 * BATCH + 4),), 0.0)
    lines = [line for line in HISTORY if (line.generation, line.step, line.rank) != (4, 9, 0)] + [wrong]
    found = progress.count_samples(progress.counted_lines(lines, LINEAGE))
    assert found is not None
    assert (found.lost, found.repeated) == (2, 2)


def test_several_batches_a_step_count_all_of_them() -> None:
    def micro(step: int, rank: int) -> tuple[tuple[int, int], ...]:
        begins = [((step - 1) * 3 + number) * BATCH for number in range(3)]
        return tuple((begin + rank * 2, begin + rank * 2 + 2) for begin in begins)

    lines = [LedgerEntry(1, step, rank, 1.0, micro(step, rank), 0.0) for step in range(1, 5) for rank in range(3)]
    found = progress.count_samples(progress.counted_lines(lines, (LineageEntry(1, None, 3),)))
    assert found == progress.SampleAccount(4, 3 * BATCH, lost=0, repeated=0)
    torn = [replace(x, samples=(x.samples or ())[:2]) if (x.step, x.rank) == (2, 1) else x for x in lines]
    found = progress.count_samples(progress.counted_lines(torn, (LineageEntry(1, None, 3),)))
    assert found == progress.SampleAccount(4, 3 * BATCH, lost=2, repeated=0)


def test_a_step_that_nobody_ran_is_lost_whole() -> None:
    lines = [line for line in HISTORY if line.step != 6]
    found = progress.count_samples(progress.counted_lines(lines, LINEAGE))
    assert found is not None
    assert (found.lost, found.missing_steps) == (BATCH, (6,))


def uneven(ranks: int = 2) -> list[LedgerEntry]:
    """Steps of 5, 3, 1, 7 and 4 samples, each of which tells where it begins and ends."""
    ends = [0, 5, 8, 9, 16, 20]
    found = []
    for step, (start, stop) in enumerate(pairwise(ends), 1):
        for rank in range(ranks):
            bounds = [start + (stop - start) * part // ranks for part in (rank, rank + 1)]
            found.append(LedgerEntry(1, step, rank, 1.0, ((bounds[0], bounds[1]),), 0.0, span=(start, stop)))
    return found


UNEVEN: Lineage = (LineageEntry(1, None, 2),)


def test_steps_of_unlike_sizes_are_counted_by_where_each_begins_and_ends() -> None:
    assert progress.count_samples(progress.counted_lines(uneven(), UNEVEN)) == progress.SampleAccount(
        5, 7, lost=0, repeated=0
    )


@pytest.mark.parametrize("world_known", [True, False])
@pytest.mark.parametrize("step", [1, 2, 4, 5])
def test_of_unlike_sizes_a_rank_s_share_that_is_missing_is_lost_or_unknown(step: int, world_known: bool) -> None:
    lines = [line for line in uneven() if (line.step, line.rank) != (step, 1)]
    kept = progress.counted_lines(lines, UNEVEN)
    found = progress.count_samples(kept, ranks=progress.world_size_by_step(kept, UNEVEN) if world_known else None)
    (share,) = [line.samples for line in uneven() if (line.step, line.rank) == (step, 1)]
    assert share is not None
    missing = share[0][1] - share[0][0]
    assert missing > 0
    assert found is not None
    assert (found.lost, found.unknown, found.repeated) == ((0, missing, 0) if world_known else (missing, 0, 0))


def test_of_unlike_sizes_a_step_that_nobody_ran_ends_where_the_next_one_begins() -> None:
    found = progress.count_samples(progress.counted_lines([line for line in uneven() if line.step != 4], UNEVEN))
    assert found is not None
    assert (found.lost, found.repeated, found.missing_steps) == (7, 0, (4,))


def test_of_unlike_sizes_a_step_that_skips_or_goes_back_is_seen_though_it_tells_its_own_span() -> None:
    def moved(by: int) -> progress.SampleAccount | None:
        def shifted(line: LedgerEntry) -> LedgerEntry:
            assert line.samples is not None
            assert line.span is not None
            spans = tuple((start + by, stop + by) for start, stop in line.samples)
            return replace(line, samples=spans, span=(line.span[0] + by, line.span[1] + by))

        lines = [shifted(line) if line.step >= 3 else line for line in uneven()]
        return progress.count_samples(progress.counted_lines(lines, UNEVEN))

    assert moved(2) == progress.SampleAccount(5, 7, lost=2, repeated=0)
    assert moved(-3) == progress.SampleAccount(5, 7, lost=0, repeated=3)


def test_a_program_that_reports_no_samples_has_no_account() -> None:
    lines = [LedgerEntry(1, 1, 0, 1.0, None, 0.0)]
    assert progress.count_samples(progress.counted_lines(lines, (LineageEntry(1, None, 1),))) is None
    assert progress.count_samples({}) is None


@given(st.lists(st.integers(0, 30), min_size=0, max_size=6))
def test_lost_and_repeated_always_add_up_to_what_was_read(cuts: list[int]) -> None:
    spans = [(a, a + 3) for a in cuts]
    lost, repeated = progress._compare(spans, 10, 20)
    covered = {p for a, b in spans for p in range(a, b) if 10 <= p < 20}
    assert lost == 10 - len(covered)
    assert repeated == 3 * len(spans) - len(covered)


def test_a_step_s_loss_is_the_mean_over_ranks_and_exact_where_all_ranks_agree() -> None:
    lines = {
        1: [LedgerEntry(1, 1, 0, 1.0, ((0, 4),), 0.0), LedgerEntry(1, 1, 1, 4.0, ((4, 6),), 0.0)],
        2: run_of(1, 3, 2, 2),
    }
    assert progress.mean_loss_by_step(lines) == {1: 2.5, 2: 0.5}
    assert progress.largest_difference({1: 1.0, 2: 3.0}, {2: 2.5, 3: 9.0}) == 0.5
    assert progress.largest_difference({1: 1.0}, {2: 1.0}) is None


@pytest.mark.parametrize("world", range(1, 9))
def test_a_loss_that_carries_its_batch_s_weight_is_equal_at_every_world_size(world: int) -> None:
    """README's loop: the mean over a rank's own samples times `Batch.weight`. Shares of 64 samples are uneven at 3, 5, 6 and 7."""
    sample_losses = [float(number**2) for number in range(640)]
    lines = []
    for rank in range(world):
        batch = next(iter(ElasticLoader(sample_losses, 64, seed=7, rank=rank, num_replicas=world, collate_fn=list)))
        own_mean = sum(batch.data) / len(batch.data)
        lines.append(LedgerEntry(1, 1, rank, own_mean * batch.weight, ((batch.start, batch.stop),), 0.0))
    whole = next(iter(ElasticLoader(sample_losses, 64, seed=7, rank=0, num_replicas=1, collate_fn=list)))
    assert progress.mean_loss_by_step({1: lines})[1] == pytest.approx(sum(whole.data) / 64, rel=1e-12)


def test_a_step_is_finished_when_every_rank_has_finished_it() -> None:
    lines = [*run_of(1, 3, 1, 4), LedgerEntry(1, 5, 0, 1.0, None, 0.0)]
    assert progress.finished_step(lines, 1, 3) == 4
    assert progress.finished_step(lines[:-1], 1, 4) == 0
    assert progress.finished_step(lines, 2, 3) == 0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"generation": 1}', '{"generation":1,"step":1,"rank":0,"samples":[1],"at":0}']
)
def test_a_torn_line_is_no_line(text: str) -> None:
    assert progress.parse_line(text) is None


def test_a_line_reads_as_an_agent_writes_it() -> None:
    body = {"generation": 1, "step": 2, "rank": 0, "loss": 0.5, "samples": [[6, 8], [12, 14]], "at": 9.5}
    assert progress.parse_line(json.dumps(body)) == LedgerEntry(1, 2, 0, 0.5, ((6, 8), (12, 14)), 9.5)


TAKEN_UP: Lineage = (LineageEntry(1, Checkpoint(-7, 4), 3), LineageEntry(2, Checkpoint(1, 6), 2))


def test_a_job_that_took_up_an_older_ones_checkpoint_counts_from_there() -> None:
    lines = run_of(1, 3, 5, 7) + run_of(2, 2, 7, 9)
    kept = progress.counted_lines(lines, TAKEN_UP)
    assert progress.count_samples(kept, first_own_step(TAKEN_UP)) == progress.SampleAccount(
        9, BATCH, lost=0, repeated=0
    )
    gap = progress.count_samples(
        progress.counted_lines([x for x in lines if x.step != 6], TAKEN_UP), first_own_step(TAKEN_UP)
    )
    assert gap is not None
    assert (gap.lost, gap.missing_steps) == (BATCH, (6,))


def test_the_older_jobs_batches_may_have_differed_but_a_loader_at_0_took_nothing_up() -> None:
    shifted = [replace(x, samples=tuple((a + 100, b + 100) for a, b in x.samples or ())) for x in run_of(1, 3, 5, 9)]
    found = progress.count_samples(progress.counted_lines(shifted, TAKEN_UP[:1]), 5)
    assert found == progress.SampleAccount(9, BATCH, lost=0, repeated=0)
    anew = [replace(x, step=x.step + 4) for x in run_of(1, 3, 1, 5)]
    found = progress.count_samples(progress.counted_lines(anew, TAKEN_UP[:1]), 5)
    assert found is not None
    assert (found.lost, found.repeated) == (5 * BATCH, 5 * BATCH)


def test_what_a_rollback_left_out_is_neither_lost_nor_repeated() -> None:
    """Epoch 2 goes back from step 6 to 4 and leaves two steps' batches out; epoch 3 fails and restores the same again."""
    lineage: Lineage = (
        LineageEntry(1, None, 3),
        LineageEntry(2, Checkpoint(1, 4), 3),
        LineageEntry(3, Checkpoint(1, 4), 3),
    )
    shifted = [
        replace(x, samples=tuple((a + 2 * BATCH, b + 2 * BATCH) for a, b in x.samples or ()))
        for x in run_of(3, 3, 5, 8)
    ]
    kept = progress.counted_lines(run_of(1, 3, 1, 6) + shifted, lineage)
    skips = progress.skips_of(lineage, (SkippedData(2, 2), SkippedData(3, 2)))
    assert skips == {5: 2}
    found = progress.count_samples(kept, skips=skips)
    assert found == progress.SampleAccount(8, BATCH, lost=0, repeated=0, skipped=((4 * BATCH, 6 * BATCH),))
    # more than it said is lost, and who skipped nothing repeats nothing
    assert progress.count_samples(kept, skips={5: 1}) == progress.SampleAccount(
        8, BATCH, 4 * BATCH, 4 * BATCH, skipped=((4 * BATCH, 5 * BATCH),)
    )
    same = progress.counted_lines(run_of(1, 3, 1, 6) + run_of(3, 3, 5, 8), lineage)
    assert progress.count_samples(same, skips=skips) == progress.SampleAccount(8, BATCH, lost=0, repeated=0)
