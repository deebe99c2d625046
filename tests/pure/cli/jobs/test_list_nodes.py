"""A job's nodes: what runs there, and why they are left; what may not be read is a dash."""

from __future__ import annotations

from dataclasses import replace

from support.builders import BEGAN, running, with_node, with_worker
from support.stored import view_of_snapshot
from surefoot_operator.api.status import ExcludedNode
from surefoot_operator.cli.jobs.describe import node_lines, node_rows
from surefoot_operator.job_snapshot import NodeSeen


def test_each_node_has_its_workers_ranks_and_holder() -> None:
    found = node_rows(view_of_snapshot(running()))
    assert [(one.name, one.state, one.workers, one.ranks, one.holder) for one in found] == [
        (f"n{n}", "Ready", (f"{n}-1",), (str(n),), "running") for n in range(3)
    ]
    assert node_lines(found)[1].split() == ["n0", "Ready", "n0", "0-1", "0", "running"]


def test_states_and_reasons_are_told_apart() -> None:
    seen = with_node(running(), "n0", ready=False, reason="its taint")
    seen = with_node(seen, "n1", schedulable=False, signal="it has the taint x")
    seen = with_node(seen, "n2", doubt="its kubelet is silent")
    seen = replace(
        seen, status=replace(seen.status, excluded_nodes=(ExcludedNode("n9", "it failed twice", BEGAN + 900),))
    )
    found = {one.name: (one.state, one.why) for one in node_rows(view_of_snapshot(seen))}
    assert found == {
        "n0": ("NotReady", "its taint"),
        "n1": ("Ready, cordoned", "it has the taint x"),
        "n2": ("doubted", "its kubelet is silent"),
        "n9": ("gone", "it failed twice"),
    }


def test_nodes_that_may_not_be_read_are_not_gone() -> None:
    view = replace(view_of_snapshot(running()), nodes=None, holders=None)
    assert {(one.state, one.domain, one.holder) for one in node_rows(view)} == {("-", "-", "-")}


def test_a_worker_that_ended_holds_no_node_but_its_member_is_shown() -> None:
    found = node_rows(view_of_snapshot(with_worker(running(), 1, phase="Failed")))
    assert [(one.name, one.workers) for one in found][1] == ("n1", ())


def test_other_nodes_of_the_cluster_are_shown_when_asked_for() -> None:
    seen = running()
    view = view_of_snapshot(replace(seen, nodes=(*seen.nodes, NodeSeen("spare", "spare", True))))
    view = replace(view, holders={"n0": False})
    assert [one.name for one in node_rows(view)] == ["n0", "n1", "n2"]
    assert [(one.name, one.holder) for one in node_rows(view, everything=True)][-1] == ("spare", "none")
    assert node_rows(view)[0].holder == "not ready"


def test_a_job_that_is_nowhere_says_so() -> None:
    assert node_lines([]) == ["the job has no node"]
