"""`surefoot local` with real trainers: every kind of fault, and the result of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surefoot_operator.fabric.processes.life import with_environment

SECONDS = 500

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import surefoot

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8, dtype=torch.float64)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
dataset = torch.utils.data.TensorDataset(torch.randn(960, 8, dtype=torch.float64))
loader = surefoot.ElasticLoader(dataset, 12, seed=0)
checkpointer = surefoot.Checkpointer(model=model, optimizer=optimizer, loader=loader)
start = checkpointer.restore()
for step, batch in zip(range(start + 1, int(sys.argv[1]) + 1), loader):
    loss = (model(batch.data[0]) ** 2).mean() * batch.weight
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    checkpointer.step(mean)
    time.sleep(0.05)  # a step takes as long as a small model's
checkpointer.close()
dist.destroy_process_group()
"""

JOB = """
apiVersion: surefoot.dev/v1alpha1
kind: TrainingJob
metadata: {{name: faults}}
spec:
  replicas: 3
  elasticPolicy: {{minReplicas: 2, maxReplicas: 3}}
  checkpoint: {{memory: {{intervalSteps: 5, replicas: 2}}}}
  template:
    spec:
      containers:
      - name: trainer
        command: [python, {script}, "{steps}"]
"""


def run(folder: Path, steps: int, *arguments: str) -> tuple[dict[str, Any], str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    job = folder / "job.yaml"
    job.write_text(JOB.format(script=script, steps=steps))
    command = [sys.executable, "-m", "surefoot_operator.cli.main", "local", "-f", str(job), "--plain"]
    command += ["--run-folder", str(folder / "run"), "--report", str(folder / "report.json"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert with_environment("SUREFOOT_RUN_FOLDER", str((folder / "run").resolve())) == []
    assert [path for path in (folder / "run").rglob("*") if path.is_socket()] == []
    return json.loads((folder / "report.json").read_text()), said


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_killed_trainer_and_a_killed_node_change_nothing_of_the_result(tmp_path: Path) -> None:
    faults = ["--fault", "trainer:0@step=60", "--fault", "node:1@step=120,for=2"]
    report, said = run(tmp_path, 240, *faults, "--compare")
    assert report["outcome"] == "Complete"
    assert (report["samples_lost"], report["samples_repeated"], report["steps"]) == (0, 0, 240)
    assert report["max_loss_difference"] < 1e-10
    assert report["max_parameter_difference"] < 1e-10
    kinds = [incident["kind"] for incident in report["incidents"] if incident["fault"]]
    assert kinds == ["trainer-failed", "node-lost"]
    for incident in report["incidents"]:
        assert 0 <= incident["detected_seconds"] <= incident["assigned_seconds"] <= incident["first_step_seconds"]
        assert incident["steps_lost"] <= 5
        assert incident["restored_from"] == "memory"
    assert report["checkpoints"]["bytes"] > 0
    assert "samples lost 0, repeated 0" in said.splitlines()[-4]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_training_survives_a_coordinator_a_holder_an_agent_and_a_freeze(tmp_path: Path) -> None:
    faults = ["coordinator@step=20,for=1", "memory:2@step=60,for=1", "agent:0@step=110", "freeze:1@step=200,for=5"]
    report, _ = run(tmp_path, 420, *(part for fault in faults for part in ("--fault", fault)))
    assert report["outcome"] == "Complete"
    assert (report["samples_lost"], report["samples_repeated"], report["steps"]) == (0, 0, 420)
    assert len(report["faults"]) == 4
    caused = {incident["fault"]: incident for incident in report["incidents"] if incident["fault"]}
    # neither a dead coordinator nor a dead holder ends an epoch
    assert set(caused) == {"kill agent of node-0 at step 110", "freeze node-1 at step 200, thaws after 5 s"}
    assert all(incident["steps_lost"] <= 5 for incident in caused.values())
    frozen = caused["freeze node-1 at step 200, thaws after 5 s"]
    assert frozen["detected_seconds"] <= 4.0  # heartbeatTimeoutSeconds and one
