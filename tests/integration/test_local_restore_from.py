"""`surefoot local`: a new job begins where an older one ended, as if one job had run through; the old folder is only read."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot

SECONDS = 200

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import surefoot

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8, dtype=torch.float64)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
dataset = torch.utils.data.TensorDataset(torch.randn(96, 8, dtype=torch.float64))
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
    time.sleep(float(sys.argv[2]))
checkpointer.close()
dist.destroy_process_group()
"""


def run(
    folder: Path, name: str, steps: int, workers: int, *faults: str, **checkpoint: Any
) -> subprocess.CompletedProcess[str]:
    """The job `name` in run folder `name`; its persistent tier is the same for all."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    tier = {"uri": f"file://{folder}/tier", "intervalSteps": 5}
    trainer = {"name": "trainer", "command": ["python", str(script), str(steps), "0.1" if faults else "0"]}
    body = {
        "apiVersion": "surefoot.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "replicas": workers,
            "checkpoint": {"memory": {"intervalSteps": 5}, "persistent": tier, **checkpoint},
            "template": {"spec": {"containers": [trainer]}},
        },
    }
    job = folder / f"{name}.yaml"
    job.write_text(json.dumps(body))
    command = [sys.executable, "-m", "surefoot_operator.cli.main", "local", "-f", str(job), "--plain"]
    command += ["--run-folder", str(folder / name), "--report", str(folder / f"{name}.json")]
    command += [part for fault in faults for part in ("--fault", fault)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def report(folder: Path, name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return body


def ledger(folder: Path, name: str) -> dict[int, tuple[float, int, int]]:
    """step -> loss, first and last position of its samples."""
    found: dict[int, tuple[float, int, int]] = {}
    for path in (folder / name / "ledger").glob("*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            [(first, last)] = line["samples"]
            _, start, stop = found.get(line["step"], (0.0, first, last))
            found[line["step"]] = line["loss"], min(start, first), max(stop, last)
    return found


def undisturbed(steps: int) -> dict[int, float]:
    """step -> loss of the same training in one piece, by one rank, without checkpoints."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8, dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        dataset = torch.utils.data.TensorDataset(torch.randn(96, 8, dtype=torch.float64))
    found = {}
    for step, batch in zip(range(1, steps + 1), surefoot.ElasticLoader(dataset, 12, seed=0), strict=False):
        loss = (model(batch.data[0]) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[step] = float(loss.detach())
    return found


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_new_job_goes_on_where_an_older_one_ended(tmp_path: Path) -> None:
    first = run(tmp_path, "first", 15, 2)
    assert first.returncode == 0, first.stdout + first.stderr
    (old,) = (tmp_path / "tier").iterdir()
    before = content(old)

    # one rank takes up what two saved, and once more when it died before it had saved anything of its own
    rarely = {"intervalSteps": 50}
    later = run(tmp_path, "later", 30, 1, "trainer:0@step=17", restoreFrom={"uid": old.name}, memory=rarely)
    assert later.returncode == 0, later.stdout + later.stderr

    assert content(old) == before
    begun, whole = ledger(tmp_path, "later"), undisturbed(30)
    assert sorted(begun) == list(range(16, 31))
    for step, (loss, start, stop) in begun.items():
        assert (start, stop) == ((step - 1) * 12, step * 12)
        assert loss == pytest.approx(whole[step], abs=1e-12)
    found = report(tmp_path, "later")
    assert (found["steps"], found["samples_lost"], found["samples_repeated"]) == (30, 0, 0)
    begun_at = [
        (generation["world_size"], generation["from_step"], generation["restored_from"])
        for generation in found["generations"]
    ]
    assert begun_at == [(1, 15, "source job"), (1, 15, "source job")]
    status = json.loads((tmp_path / "later" / "status.json").read_text())
    assert (status["origin"], status["sourceJob"]["job"]) == ({"generation": -1, "step": 15}, old.name)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_step_that_the_older_job_does_not_have_fails_the_new_one(tmp_path: Path) -> None:
    first = run(tmp_path, "first", 10, 1)
    assert first.returncode == 0, first.stdout + first.stderr
    (old,) = (tmp_path / "tier").iterdir()
    before = content(old)
    done = run(tmp_path, "later", 20, 1, restoreFrom={"uri": f"file://{old}", "step": 7})
    assert done.returncode != 0
    assert "no complete checkpoint of step 7 to start from: complete checkpoints are at steps 10" in done.stdout
    assert content(old) == before
