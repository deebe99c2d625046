"""A report's facts: what counts, what was run again, who ran it, and where the time went."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import running
from support.ledgers import BEGAN, FAILED, broken_run
from support.stored import view_of_snapshot
from surefoot_operator.api.status import TimeSpent
from surefoot_operator.cli.jobs.describe import timeline_of
from surefoot_operator.cli.jobs.read_jobs import JobView
from surefoot_operator.cli.local.progress import Fault
from surefoot_operator.cli.local.run_report import Struck
from surefoot_operator.cli.report.report_data import ReportFacts, RunRecords, facts_of_view, with_ledger


def view() -> JobView:
    seen = running()
    status = replace(
        seen.status, phase="Complete", incidents=(FAILED,), start_seconds=BEGAN, completion_seconds=BEGAN + 26, step=20
    )
    return view_of_snapshot(replace(seen, status=status))


@pytest.fixture
def facts() -> ReportFacts:
    return with_ledger(facts_of_view(view(), "here"), broken_run())


def test_what_counts_is_told_from_what_was_run_again(facts: ReportFacts) -> None:
    assert facts.loss is not None
    assert [step for step, _ in facts.loss.kept] == list(range(1, 21))
    assert [[step for step, _ in one] for one in facts.loss.discarded] == [[11, 12]]
    assert len(facts.loss.undisturbed) == 20
    assert facts.account is not None
    assert (facts.account.lost, facts.account.repeated) == (0, 0)


def test_seconds_are_the_operators_own_account_up_to_now() -> None:
    spent = TimeSpent("training", BEGAN + 16, training_seconds=12, recovering_seconds=3, starting_seconds=1)
    looked = view()
    assert looked.stored.status is not None
    stored = replace(looked.stored, status=replace(looked.stored.status, time_spent=spent))
    found = facts_of_view(replace(looked, now=BEGAN + 20, stored=stored), "here")
    assert found.seconds == {"training": 16, "recovering": 3, "starting": 1}
    assert found.goodput == 0.8
    # a run that was broken off went on until its last step, not until somebody looked
    assert facts_of_view(replace(looked, now=BEGAN + 9999, stored=stored), "here", BEGAN + 17).seconds["training"] == 13
    assert (facts_of_view(looked, "here").seconds, facts_of_view(looked, "here").goodput) == ({}, None)


def test_phases_are_the_figures_of_the_timeline(facts: ReportFacts) -> None:
    [told] = [one for one in timeline_of(view()) if one.kind == "incident"]
    [found] = facts.incidents
    assert [f"{one.at_seconds:8.3f} s  {one.said}" for one in found.phases] == [
        phase.removeprefix("  ") for phase in told.phases
    ]
    assert found.took_seconds == 3.0


def test_seconds_count_from_the_injected_fault_where_it_is_known() -> None:
    struck = (Struck(Fault("node", "node-1", 12, None), BEGAN + 12.5, 12, 1),)
    [found] = with_ledger(facts_of_view(view(), "here"), replace(broken_run(), struck=struck)).incidents
    assert (found.at_seconds, found.took_seconds) == (BEGAN + 12.5, 3.5)
    assert found.fault == "kill node-1 at step 12"


def test_a_worker_that_is_gone_is_still_shown_where_it_ran(facts: ReportFacts) -> None:
    gone = next(one for one in facts.placements if one.worker == "1-1" and one.last_step == 12)
    assert (gone.ranks, gone.epochs, gone.first_step) == ((1,), (1,), 1)
    without = with_ledger(replace(facts_of_view(view(), "here"), placements=()), broken_run())
    assert [(one.worker, one.node, one.state) for one in without.placements] == [
        ("0-1", "", "gone"),
        ("1-1", "node-1", "gone"),
    ]


def test_of_each_save_the_slowest_rank_counts(facts: ReportFacts) -> None:
    assert [step for step, _ in facts.stalls.by_step] == [1, 6, 11]
    assert facts.stalls.median_seconds == facts.stalls.most_seconds == 0.01


def test_a_running_job_counts_no_step_that_some_rank_has_not_finished() -> None:
    run = broken_run()
    early = RunRecords(run.lines[:23], run.lineage[:1], ())  # rank 1 has not written step 12
    running_now = replace(facts_of_view(view(), "here"), outcome="Running")
    found = with_ledger(running_now, early)
    assert found.loss is not None
    assert found.loss.kept[-1][0] == 11
    assert found.loss.discarded == ()


def test_a_cluster_tells_no_step_and_says_nothing_of_them() -> None:
    found = facts_of_view(view(), "a cluster")
    assert (found.loss, found.account, found.checkpoints) == (None, None, None)
    assert [one.worker for one in found.placements] == [f"{one.index}-{one.attempt}" for one in running().workers]
