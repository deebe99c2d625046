"""`surefoot local` with an operator that cannot look into the memory tier, which lives: nothing is lost for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.local_run import SECONDS, Holder, Job, LocalRun, assert_equal, assert_whole, running
from surefoot.memory_server.connection import Credentials, RespConnection

ANOTHER = "another password"


def saved_steps(run: LocalRun, holder: Holder) -> list[int]:
    index = run.index_of(holder)
    return sorted({manifest.save.step for manifest in index.manifests}) if index is not None else []


class Locks:
    """Each holder's administrator gets another password, and the operator's connections end."""

    def __init__(self, holders: list[Holder]) -> None:
        self._holders = holders
        self._wires = [RespConnection(h.host, h.port, Credentials("", h.password), 2.0) for h in holders]

    def change(self) -> None:
        for wire in self._wires:
            wire.call("ACL", "SETUSER", "default", "resetpass", f">{ANOTHER}")
            wire.call("CLIENT", "KILL", "USER", "default", "SKIPME", "yes")

    def restore(self) -> None:
        for wire, holder in zip(self._wires, self._holders, strict=True):
            wire.call("ACL", "SETUSER", "default", "resetpass", f">{holder.password}")
            wire.close()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_job_whose_holders_refuse_the_operator_waits_and_recovers_once_they_do_not(tmp_path: Path) -> None:
    job = Job(steps=90, gates=(30, 60, 85), policy={"memoryServerTimeoutSeconds": 0.5, "onTotalLoss": "Fail"})
    with running(tmp_path, job, "--compare") as run:
        run.wait_for_step(30)
        run.wait("checkpoints of step 30", lambda: run.status.last_complete is not None)
        locks = Locks(run.holders())
        locks.change()
        run.wait("a word that the holders are not seen", lambda: bool(run.told("MemoryServersUnreachable")))
        assert "rejects this account" in run.told("MemoryServersUnreachable")[0]
        assert len(run.epochs_of_trainers()) == 2, "the training goes on"
        run.open_gate(30)
        run.wait_for_step(60)
        seen_by_agents = [replace(holder, password=ANOTHER) for holder in run.holders()]
        run.wait("old saves to be dropped", lambda: all(saved_steps(run, h) == [55, 60] for h in seen_by_agents))
        run.kill_a_trainer()
        run.wait("the job to wait for its holders", lambda: "rejects the operator" in run.status.message)
        assert "accept-loss" in run.status.message
        assert run.status.lost_servers == ()
        locks.restore()
        run.wait_for_epoch(2)
        done = run.finish()
    assert_whole(done.report, 90)
    assert_equal(done.report)
    incident = done.report["incidents"][0]
    assert incident["steps_lost"] <= 5, "agents save where the operator does not look"
    assert incident["restored_from"] in ("staging", "memory", "staging+memory"), incident
