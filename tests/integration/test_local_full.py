"""`surefoot local` with tiers that are full or away for a while: training goes on, it is said, and saving resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_whole, running

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_memory_tier_that_is_too_small_stops_no_training_and_saves_again_when_it_has_room(tmp_path: Path) -> None:
    # 3.3 MB of state in all, and a server needs about 1 MiB for itself; slow enough that 45 steps are a stall
    trainer = ("--width", "8192", "--pace", "0.15")
    job = Job(steps=90, memory={"sizeLimit": "3Mi"}, gates=(45,), trainer=trainer)
    with running(tmp_path, job) as run:
        run.wait("a word that checkpoints do not fit", lambda: bool(run.told("CheckpointsTooLarge")))
        run.wait("a word that saving has stalled", lambda: bool(run.told("CheckpointOverdue")))
        run.wait("a word that a save is not whole", lambda: bool(run.told("SaveUnderReplicated")))
        run.wait_for_step(45)
        assert run.status.last_complete is None
        protected = next(c for c in run.status.conditions if c.type == "CheckpointProtected")
        assert (protected.status, protected.reason) == ("False", "Overdue")
        assert "; checkpoints do not fit: node-" in protected.message
        document = json.loads(run.run_folder.job_file.read_text())
        document["spec"]["checkpoint"]["memory"]["sizeLimit"] = "64Mi"
        run.run_folder.job_file.write_text(json.dumps(document))
        for holder in run.holders():
            holder.call("CONFIG SET", "maxmemory", 64 * MIB)
        run.open_gate(45)
        run.wait("a complete checkpoint", lambda: run.status.last_complete is not None)
        done = run.finish()
    assert_whole(done.report, 90)
    assert done.report["incidents"] == []
    assert run.status.last_complete is not None
    assert run.status.last_complete.step == 90
    protected = next(c for c in run.status.conditions if c.type == "CheckpointProtected")
    assert (protected.status, protected.reason) == ("True", "SufficientCopies")
    incomplete = done.told("SaveUnderReplicated")
    assert any("full" in text or "memory" in text for text in incomplete), incomplete
