"""`surefoot local` of which every checkpoint is lost: it waits and says so, and Ctrl-C ends it in order."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, faults, running


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_run_that_lost_every_checkpoint_waits_until_a_person_says_what_is_to_be_done(tmp_path: Path) -> None:
    job = Job(steps=40, gates=(10, 20), policy={"memoryServerTimeoutSeconds": 0.5})
    both = faults("memory:node-0@step=20", "memory:node-1@step=20", "trainer:node-0@step=20")
    with running(tmp_path, job, *both) as run:
        run.wait("a checkpoint that can be lost", lambda: run.status.last_complete is not None)
        run.open_gate(10)
        run.wait("a word that everything is lost", lambda: bool(run.told("CheckpointLost")))
        assert "node-0" in run.told("CheckpointLost")[0]
        run.wait("what to do at the keyboard", lambda: "stop the run with Ctrl-C" in run.said)
        assert run.status.phase == "Recovering"
        assert run.status.membership is not None
        epoch = run.status.membership.generation
        document = json.loads(run.run_folder.job_file.read_text())
        document["metadata"]["annotations"] = {"surefoot.dev/accept-loss": str(epoch)}
        run.run_folder.job_file.write_text(json.dumps(document))
        run.wait("training from the beginning", lambda: len(run.progress.lineage) == 2)
        assert run.progress.lineage[-1].parent is None
        run.process.send_signal(signal.SIGINT)
        run.process.wait(60)
        assert run.processes() == []
        assert json.loads((tmp_path / "report.json").read_text())["outcome"] == "Interrupted"
