"""The examples of other people's frameworks, on three nodes of which one is killed and returns, against an undisturbed run.

Marked long: each makes two whole runs, whose processes import the framework. `python -m bench frameworks` brings what they need.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "integrations"
NEEDED = {
    "accelerate_loop": "accelerate",
    "hugging_face": "transformers",
    "lightning_module": "lightning",
    "logged_loop": "tensorboard",
    "titan_loop": "torchtitan",
}
SECONDS = 900
SLOWLY = ROOT / "tests" / "support" / "programs" / "waits_while_short.py"
NODES, STRUCK, PACE_SECONDS = 3, 30, 2.0
"""At this pace of a world that is too small all nodes are there by the step, and the one that was killed again by the last."""


def test_each_example_is_a_program_a_job_and_a_row_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDED) == {p.stem for p in EXAMPLES.glob("*.yaml")}


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_an_example_s_job_runs_that_example(name: str) -> None:
    job = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", f"examples/integrations/{name}.py"]


@pytest.mark.nightly
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", sorted(NEEDED))
def test_a_killed_node_and_two_resizes_change_nothing(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(NEEDED[name]) is None:
        pytest.skip(f"{NEEDED[name]} is not installed: python -m bench frameworks")
    file, logs = tmp_path / "job.yaml", tmp_path / "logs"
    job = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    [container] = job["spec"]["template"]["spec"]["containers"]
    _, script = container["command"]
    container["command"] = ["python", str(SLOWLY), str(NODES), str(PACE_SECONDS), script]
    container["args"] = [*container.get("args", []), *(["--logs", str(logs)] if name == "logged_loop" else [])]
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    command = ["local", "-f", str(file), "--nodes", str(NODES), "--fault", f"node:1@step={STRUCK},for=1"]
    report = tmp_path / "report.json"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [str(Path(sys.executable).with_name("surefoot")), *command, "--compare", "--plain", "--report", str(report)],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    found = json.loads(report.read_text(encoding="utf-8"))
    assert (found["samples_lost"], found["samples_repeated"]) == (0, 0)
    assert any(one["kind"] == "node-lost" for one in found["incidents"])
    worlds = [generation["world_size"] for generation in found["generations"]]
    assert worlds[-3:] == [NODES, NODES - 1, NODES], worlds
    # transformers computes a causal loss in float32, whose sums over ranks round otherwise at another world size
    most = 1e-5 if name == "hugging_face" else 1e-10
    assert found["max_parameter_difference"] < most
    if name != "titan_loop":  # torchtitan gives its checkpoint manager no loss
        assert found["max_loss_difference"] < most
    if name == "logged_loop":
        told = sorted(check_logged(folder) for folder in logs.iterdir())
        assert len(told) == 2, "the undisturbed job logs too"
        assert [str(world) for world in worlds] in told


def check_logged(folder: Path) -> list[str]:
    """Each step is there once; returns the sizes of the worlds, as they followed each other."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    assert [one.step for one in read.Scalars("train/loss")] == list(range(1, 61))
    texts = [bytes(one.tensor_proto.string_val[0]).decode() for one in read.Tensors("surefoot/world/text_summary")]
    assert read.Tensors("surefoot/checkpoint/text_summary")
    return [text.split("world of ")[1].split()[0] for text in texts]
