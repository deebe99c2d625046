"""`surefoot local` with intervals in seconds, left to the operator, and of one step: chosen, said, and obeyed by trainers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, LocalRun, running
from surefoot_operator.api.status import SaveInterval

ENDLESS = 100_000
"""Steps of a run that ends with its test."""

LOOKED_AT = 4
"""Newest checkpoints whose distances are looked at."""


def memory_steps(run: LocalRun) -> list[int]:
    """Steps of the present epoch that some holder has every rank's save of, ascending."""
    world = run.status.membership
    if world is None:
        return []
    found: dict[int, set[int]] = {}
    for holder in run.holders():
        index = run.index_of(holder)
        for manifest in index.manifests if index is not None else ():
            if manifest.save.generation == world.generation:
                found.setdefault(manifest.save.step, set()).add(manifest.save.rank)
    return sorted(step for step, ranks in found.items() if len(ranks) == world.world_size)


def chosen(run: LocalRun, steps_above: int = 0) -> SaveInterval:
    """The operator's choice for memory, awaited."""
    run.wait("a choice", lambda: (i := run.status.memory_interval) is not None and i.steps > steps_above)
    assert run.status.memory_interval is not None
    return run.status.memory_interval


def spaced(run: LocalRun) -> bool:
    """The newest checkpoints lie exactly as far apart as the status says."""
    interval = run.status.memory_interval
    steps = run.job.interval_steps or (interval.steps if interval is not None else 0)
    newest = memory_steps(run)[-LOOKED_AT:]
    apart = {after - before for before, after in pairwise(newest)}
    return len(newest) == LOOKED_AT and apart == {steps} and newest[-1] % steps == 0


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_seconds_become_steps_that_trainers_keep_also_after_a_restart(tmp_path: Path) -> None:
    tier = {"uri": f"file://{tmp_path}/tier", "intervalSeconds": 4, "keep": 2}
    memory = {"intervalSeconds": 0.6, "keep": LOOKED_AT + 1}
    job = Job(ENDLESS, interval_steps=None, memory=memory, persistent=tier, trainer=("--pace", "0.05"))
    with running(tmp_path, job) as run:
        interval = chosen(run)
        assert interval.steps == 1 << interval.exponent
        assert interval.step_seconds is not None
        assert interval.steps == 1 or interval.steps * interval.step_seconds <= 0.6
        assert "at most every 0.6 s was requested" in interval.reason
        run.wait(
            "a word on it", lambda: any("the memory tier is saved" in text for text in run.told("SaveIntervalChanged"))
        )
        run.wait("checkpoints as far apart as was chosen", lambda: spaced(run))

        below, above = run.status.memory_interval, run.status.persistent_interval
        assert below is not None
        assert above is not None
        assert above.steps % below.steps == 0
        run.wait(
            "a promoted checkpoint",
            lambda: run.status.last_uploaded is not None and run.status.last_uploaded.step > above.steps,
        )

        run.kill_a_trainer()
        run.wait_for_epoch(2)
        run.wait("checkpoints as far apart as was chosen", lambda: spaced(run))
        assert not run.told("CheckpointOverdue")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_auto_says_what_it_chose_and_from_what_and_trainers_save_no_oftener(tmp_path: Path) -> None:
    tier = {"uri": f"file://{tmp_path}/tier", "interval": "auto"}
    job = Job(ENDLESS, interval_steps=None, memory={"interval": "auto"}, persistent=tier)
    with running(tmp_path, job) as run:
        run.wait("a first checkpoint, before anything is known", lambda: bool(memory_steps(run)))
        interval = chosen(run, steps_above=16)
        for known in (interval.step_seconds, interval.cost_seconds, interval.mtbf_seconds, interval.target_seconds):
            assert known is not None
            assert known > 0
        assert "costs least, if a save costs" in interval.reason
        run.wait("a choice for the persistent tier", lambda: run.status.persistent_interval is not None)
        above = run.status.persistent_interval
        assert above is not None
        assert above.flush_seconds is not None
        assert above.steps >= interval.steps
        heard = run.progress.finished_step + 2
        run.wait_for_step(heard + 2 * interval.steps if interval.steps < 64 else heard + 64)
        allowed = run.status.memory_interval
        assert allowed is not None
        late = [step for step in memory_steps(run) if step > heard]
        assert all(step % min(interval.steps, allowed.steps) == 0 for step in late)
        assert not run.told("CheckpointOverdue")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_persistent_tier_keeps_milestones_beside_the_newest(tmp_path: Path) -> None:
    tier = {"uri": f"file://{tmp_path}/tier", "intervalSteps": 5, "keep": 1, "keepEverySteps": 20}
    job = Job(ENDLESS, persistent=tier, gates=(72,), trainer=("--pace", "0.1"))
    with running(tmp_path, job) as run:

        def kept() -> list[int]:
            folder = tmp_path / "tier" / run.uid
            return sorted(int(path.name.partition("-")[0]) for path in folder.glob("*-*") if path.is_dir())

        def are_milestones() -> bool:
            """One of each twenty steps, none of the first, and the newest."""
            steps = kept()
            places = [step // 20 for step in steps if step != 70]
            return steps[-1:] == [70] and 0 not in places and len(places) == len(set(places)) > 1

        run.wait_for_step(72)
        run.wait("nothing but milestones and the newest", are_milestones)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_each_step_is_saved_where_the_job_says_so(tmp_path: Path) -> None:
    job = Job(ENDLESS, interval_steps=1, memory={"keep": LOOKED_AT + 1}, trainer=("--pace", "0.1"))
    with running(tmp_path, job) as run:
        run.wait("checkpoints one step apart", lambda: spaced(run))
        assert run.status.memory_interval is None
        run.kill_a_trainer()
        run.wait_for_epoch(2)
        run.wait("checkpoints one step apart again", lambda: spaced(run))
        lost = run.status.incidents[-1].steps_lost
        assert lost is not None
        assert lost <= 2
