"""`surefoot local` with flipped bytes in its memory tier: healed from another copy, or the older checkpoint, and said so."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, LocalRun, assert_equal, assert_whole, running
from surefoot.protocol.identities import Checkpoint, RankSave


def newest_everywhere(run: LocalRun) -> list[Checkpoint]:
    """Checkpoints of which each of two holders has each of two ranks, oldest first."""
    held = [{m.save for m in index.manifests} for h in run.holders() if (index := run.index_of(h)) is not None]
    if len(held) < 2:
        return []
    both = set.intersection(*held)
    whole = {
        save.checkpoint for save in both if {RankSave(save.generation, save.step, rank) for rank in (0, 1)} <= both
    }
    return sorted(whole, key=lambda c: c.step)


def settled(run: LocalRun, gate: int) -> list[Checkpoint]:
    """The two newest once training stands at the gate and everything staged is where it belongs."""
    run.wait_for_step(gate)
    interval, found = run.job.interval_steps or 1, list[Checkpoint]()

    def is_there() -> bool:
        found[:] = newest_everywhere(run)[-2:]
        return len(found) == 2 and found[-1].step == gate - gate % interval

    run.wait(f"the last checkpoint before step {gate} on both holders", is_there)
    return found


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_damage_in_one_copy_is_healed_and_damage_in_all_copies_takes_the_older_checkpoint(tmp_path: Path) -> None:
    # room between saves: none of them is skipped on a busy machine
    job = Job(steps=90, gates=(32, 62), trainer=("--pace", "0.04"))
    with running(tmp_path, job, "--compare") as run:
        older, newest = settled(run, 32)
        # what rank 0 needs of rank 1's save is not in its own staging memory: it asks the holder beside it
        victim = RankSave(newest.generation, newest.step, 1)
        one = next(holder for holder in run.holders() if holder.node == run.node_of_rank(0))
        one.flip_a_byte(run.uid, victim)
        run.kill_a_trainer()
        run.wait("the damage's name", lambda: bool(run.told("CorruptionDetected")))
        run.open_gate(32)
        run.wait_for_epoch(2)
        assert run.progress.lineage[-1].parent == newest
        assert not run.told("CheckpointUnreadable")

        older, newest = settled(run, 62)
        victim = RankSave(newest.generation, newest.step, 1)
        for holder in run.holders():
            holder.flip_a_byte(run.uid, victim)
        run.kill_a_trainer()
        run.wait("the older checkpoint", lambda: run.progress.lineage[-1].parent == older)
        run.wait("a word on the bad one", lambda: bool(run.told("CheckpointUnreadable")))
        done = run.finish()
    assert_whole(done.report, 90)
    assert_equal(done.report, 0.0)
    assert done.report["parameters_bit_exact"] is True
    damage = done.told("CorruptionDetected")
    assert any(f"chunk 0 of rank 1 at step 30 of generation 1 at memory:{one.node}" in text for text in damage), damage
    assert all(text.endswith("is healed") for text in damage), damage
    (bad,) = done.told("CheckpointUnreadable")
    assert f"{newest}" in bad
    assert [e["from_step"] for e in done.report["generations"]] == [0, 30, 60, 55]
