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
from surefoot_operator.cli.local.faults import Fault, InjectedFault
from surefoot_operator.cli.local.progress import TrainerStart
from surefoot_operator.cli.local.run_report import RunRecords
from surefoot_operator.cli.report.report_data import ReportFacts, gather_facts


def view() -> JobView:
    seen = running()
    status = replace(
        seen.status, phase="Complete", incidents=(FAILED,), start_seconds=BEGAN, completion_seconds=BEGAN + 26, step=20
    )
    return view_of_snapshot(replace(seen, status=status))


@pytest.fixture
def facts() -> ReportFacts:
    return gather_facts(view(), "here", broken_run())


def test_what_counts_is_told_from_what_was_run_again(facts: ReportFacts) -> None:
    assert facts.ledger is not None
    loss, account = facts.ledger.loss, facts.ledger.account
    assert [step for step, _ in loss.counted] == list(range(1, 21))
    assert [[step for step, _ in curve] for curve in loss.discarded] == [[11, 12]]
    assert len(loss.reference) == 20
    assert account is not None
    assert (account.lost, account.repeated) == (0, 0)


def test_seconds_are_the_operators_own_account_up_to_now() -> None:
    spent = TimeSpent("training", BEGAN + 16, training_seconds=12, recovering_seconds=3, starting_seconds=1)
    looked = view()
    assert looked.stored.status is not None
    stored = replace(looked.stored, status=replace(looked.stored.status, time_spent=spent))
    found = gather_facts(replace(looked, now=BEGAN + 20, stored=stored), "here")
    assert found.seconds == {"training": 16, "recovering": 3, "starting": 1}
    assert found.goodput == 0.8
    # a run that was broken off went on until its last step, not until somebody looked
    abandoned = gather_facts(replace(looked, now=BEGAN + 9999, stored=stored), "here", until_seconds=BEGAN + 17)
    assert abandoned.seconds["training"] == 13
    assert (gather_facts(looked, "here").seconds, gather_facts(looked, "here").goodput) == ({}, None)


def test_phases_are_the_figures_of_the_timeline(facts: ReportFacts) -> None:
    [told] = [one for one in timeline_of(view()) if one.kind == "incident"]
    [found] = facts.incidents
    assert [*found.phases] == [(phase.name, phase.seconds, phase.text) for phase in told.phases]
    assert found.took_seconds == 3.0


def test_seconds_count_from_the_injected_fault_where_it_is_known() -> None:
    struck = (InjectedFault(Fault("node", "node-1", 12, None), BEGAN + 12.5, 12),)
    [found] = gather_facts(view(), "here", replace(broken_run(), struck=struck)).incidents
    assert (found.at_seconds, found.took_seconds) == (BEGAN + 12.5, 3.5)
    assert found.fault == "kill node-1 at step 12"


def test_a_worker_that_is_gone_is_still_shown_where_it_ran(facts: ReportFacts) -> None:
    gone = next(one for one in facts.placements if one.worker == "1-1" and one.last_step == 12)
    assert (gone.ranks, gone.generations, gone.first_step) == ((1,), (1,), 1)
    without = gather_facts(replace(view(), workers=()), "here", broken_run())
    assert [(one.worker, one.node, one.state) for one in without.placements] == [
        ("0-1", "", "gone"),
        ("1-1", "node-1", "gone"),
    ]


def test_of_each_save_the_slowest_rank_counts(facts: ReportFacts) -> None:
    assert facts.ledger is not None
    stalls = facts.ledger.stalls
    assert [step for step, _ in stalls.by_step] == [1, 6, 11]
    assert stalls.median_seconds == stalls.max_seconds == 0.01


def test_a_running_job_counts_no_step_that_some_rank_has_not_finished() -> None:
    run = broken_run()
    early = RunRecords(run.lines[:23], run.lineage[:1], ())  # rank 1 has not written step 12
    found = gather_facts(replace(view(), stored=replace(view().stored, phase="Running")), "here", early).ledger
    assert found is not None
    assert found.loss.counted[-1][0] == 11
    assert found.loss.discarded == ()


def test_a_cluster_tells_no_step_and_says_nothing_of_them() -> None:
    found = gather_facts(view(), "a cluster")
    assert found.ledger is None
    assert [one.worker for one in found.placements] == [f"{one.index}-{one.attempt}" for one in running().workers]


def test_the_last_phase_is_divided_by_what_the_slowest_trainer_did() -> None:
    run = broken_run()
    start = TrainerStart(BEGAN + 14.5, BEGAN + 14.7, BEGAN + 15.2)
    first = next(place for place, (_, line) in enumerate(run.lines) if line.generation == 2)
    worker, line = run.lines[first]
    faster = replace(line, start=TrainerStart(BEGAN + 14.4, BEGAN + 14.4, BEGAN + 15.0))
    lines = (*run.lines[:first], (worker, replace(line, start=start)), (worker, faster), *run.lines[first + 1 :])
    [found] = gather_facts(view(), "here", replace(run, lines=lines)).incidents
    assert [(name, at) for name, at, _ in found.phases[-4:]] == [
        ("attached", 1.5), ("connected", 1.7), ("restored", 2.2), ("first_step", 3.0),
    ]  # fmt: skip
    assert found.took_seconds == 3.0
    # Times that another clock stamped stay within the phase.
    late = replace(line, start=TrainerStart(BEGAN, BEGAN + 15, BEGAN + 99))
    [odd] = gather_facts(view(), "here", replace(run, lines=(*lines, (worker, late)))).incidents
    ends = [at for _, at, _ in odd.phases]
    assert ends == sorted(ends)
    assert ends[-1] == 3.0


def test_nodes_of_a_finished_run_have_ended_and_none_is_shown_as_broken() -> None:
    seen = view()
    nodes = tuple(replace(node, ready=False, reason="its process is gone") for node in seen.nodes or ())
    over = replace(seen, nodes=nodes, servers=dict.fromkeys([node.name for node in nodes], False))
    assert {row[1:] for row in gather_facts(over, "here", broken_run()).nodes} == {("ended", "ended")}
    running_view = replace(over, stored=replace(over.stored, phase="Running"))
    states = {row[1:] for row in gather_facts(running_view, "here", broken_run()).nodes}
    assert states == {("not ready, its process is gone", "not running")}
    assert ("ended", "ended") not in {row[1:] for row in gather_facts(over, "a cluster").nodes}
