"""`surefoot local --servers 2`: each rank's saves lie on one server of each node, and a server that dies costs no step."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, LocalRun, assert_whole, running
from surefoot.linux_process import ProcessIdentity, send_signal
from surefoot_operator.platforms.local.run_folder import NodeRecord, parse_record, read_json

SAVED, LATER = 10, 20


@pytest.mark.timeout(SECONDS)
def test_a_server_that_dies_costs_its_own_copies_and_no_step(tmp_path: Path) -> None:
    job = Job(steps=30, ranks=2, gates=(SAVED, LATER))
    with running(tmp_path, job, "--servers", "2") as run:
        run.wait_for_step(SAVED)
        run.wait("each rank's save is on both nodes", lambda: spread(run, SAVED) == [{0, 2}, {0, 2}, {1, 3}, {1, 3}])
        record = parse_record(NodeRecord, read_json(run.run_folder.node_file("node-0")) or {})
        assert len({holder.port for holder in record.servers}) == 2
        assert send_signal(ProcessIdentity.parse(record.servers[1].life), signal.SIGKILL)
        run.wait("the operator has noticed", lambda: len(run.status.assigned_servers) == 3)
        run.open_gate(SAVED)
        run.wait_for_step(LATER)
        both = [{0, 1, 2, 3}, {0, 2}, {1, 3}]
        run.wait("the other server of its node takes its ranks", lambda: spread(run, LATER) == both)
        run.open_gate(LATER)
        done = run.finish()
    assert_whole(done.report, 30)
    assert done.report["incidents"] == []


def spread(run: LocalRun, step: int) -> list[set[int]]:
    """The ranks of a step that each living server has, sorted."""
    indexes = [index for holder in run.holders() if (index := run.index_of(holder)) is not None]
    found = [{m.save.rank for m in index.manifests if m.save.step == step} for index in indexes]
    return sorted(found, key=lambda ranks: (min(ranks, default=-1), -len(ranks)))
