"""The scripts, jobs and commands that README.md and the pages for users show run as they are there, without credentials or network."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.machine_speed import scaled

ROOT = Path(__file__).parents[2]
SECONDS = scaled(240)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


README, PAGE, TUTORIAL = page("README.md"), page("docs/python.md"), page("docs/tutorial.md")


def block(kind: str, first: str, text: str = PAGE) -> str:
    """Returns the fenced block whose first line begins so."""
    return next(
        b for b in re.findall(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if b.startswith(first)
    )


def tutorial_script() -> str:
    """Returns the script that the tutorial's diff results in."""
    return "".join(f"{line[1:]}\n" for line in block("diff", " # train.py", TUTORIAL).splitlines() if line[0] != "-")


SCRIPTS = {"README": block("python", "# train.py", README), "tutorial": tutorial_script()}


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("SUREFOOT_")}
    return own | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"}


def run(command: str, folder: Path) -> str:
    """Runs a documented command in a folder that has the documented script and job, and nothing else of ours."""
    ended = subprocess.run(
        command,
        shell=True,
        check=False,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPTS["README"])
    (tmp_path / "job.yaml").write_text(block("yaml", "# job.yaml"))
    return tmp_path


def test_alone_it_names_its_checkpoints_and_continues_from_them(folder: Path) -> None:
    first = run(block("sh", "python"), folder)
    assert "continuing from step 0\n" in first
    place = f"checkpoints go to {folder}/surefoot-checkpoints/train/default"
    assert first.count(f"{place}; this run begins at step 0") == 1
    # the same checkpoints, on two ranks: named once, and all steps are done
    again = run(block("sh", "torchrun --nproc"), folder)
    assert again.count("continuing from step 200") == 2  # two ranks write to one pipe: lines may run into each other
    assert again.count(f"{place}; this run continues from step 200 of the run begun with `train.py`") == 1


def test_the_tutorials_script_can_be_killed_by_hand(tmp_path: Path) -> None:
    """As a reader does it: wait until a step is printed, kill the process by the number that it printed, start it again."""
    (tmp_path / "train.py").write_text(SCRIPTS["tutorial"])
    command = block("sh", "python train.py", TUTORIAL).split()
    first = run_until(command, tmp_path, 30)
    second = run_until(command, tmp_path, 1)
    [start] = map(int, re.findall(r"continues from step (\d+)\n", second))
    assert start % 10 == 0, "a save each ten steps"
    assert 10 <= start <= printed_steps(first)[-1]
    assert printed_steps(second)[0] == start + 1


def run_until(command: list[str], folder: Path, step: int) -> str:
    """Kills the program by the number that it prints, once it printed this step or a later one and a checkpoint is complete.

    Returns its output, also what it printed before the signal reached it.
    """
    output = ""
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as program:
        assert program.stdout is not None
        killed = False
        for line in program.stdout:
            output += line
            is_saved = any(folder.glob("surefoot-checkpoints/**/newest.json"))
            if not killed and is_saved and printed_steps(output)[-1:] >= [step]:
                [number] = re.findall(r"^process (\d+) ", output, re.MULTILINE)
                os.kill(int(number), signal.SIGKILL)
                killed = True
    assert program.returncode == -signal.SIGKILL, output
    return output


def printed_steps(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)$", output, re.MULTILINE)]


OLD = """
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "old.pt")
"""
NEW = """
import surefoot, torch
points = torch.randn(8192, 8)
dataset = list(zip(points, points.sum(dim=1, keepdim=True)))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
{shown}
old = torch.load("old.pt", weights_only=True)
assert torch.equal(model.weight, old["model"]["weight"])
assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], old["optimizer"]["state"][0]["exp_avg"])
batch = next(iter(loader))
print("step", start, "sample", batch.start)
"""


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
def test_a_file_of_torch_save_is_continued_as_the_page_shows(tmp_path: Path) -> None:
    """The old state with its optimizer, at the step and the sample that the old run had reached; and the way back."""
    text = page("docs/continue.md")
    (tmp_path / "old.py").write_text(OLD)
    (tmp_path / "to_dcp.py").write_text(block("python", "# to_dcp.py", text))
    (tmp_path / "new.py").write_text(NEW.format(shown=block("python", "loader = ", text)))
    imported, exported = (
        block("sh", "surefoot checkpoints import", text),
        block("sh", "surefoot checkpoints export", text),
    )
    run(f"python old.py && python to_dcp.py\n{imported}", tmp_path)
    assert "step 80 sample 5120\n" in run("python new.py", tmp_path)
    assert "step 80 of job default" in run(exported, tmp_path)


@pytest.mark.slow
def test_in_a_job_with_and_without_torchrun(folder: Path) -> None:
    assert "Complete: 200 steps" in run(block("sh", "surefoot local"), folder)
    words = block("sh", "torchrun --rdzv-backend").split()
    job = (folder / "job.yaml").read_text()
    (folder / "job.yaml").write_text(job.replace("[python, train.py]", f"[{', '.join(words)}]"))
    assert "Complete: 200 steps" in run(block("sh", "surefoot local"), folder)
    assert not (folder / "surefoot-checkpoints").exists(), "a job's checkpoints are where the job says"


def test_the_documented_job_is_valid(folder: Path) -> None:
    assert "job.yaml is valid" in run("surefoot validate -f job.yaml", folder)


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("name", ["README", pytest.param("tutorial", marks=pytest.mark.nightly)])
def test_the_documented_job_as_pasted_ends_and_equals_the_undisturbed_run(name: str, tmp_path: Path) -> None:
    """Runs script, job and commands of one page."""
    text, job, steps = {"README": (README, "apiVersion", 200), "tutorial": (TUTORIAL, "# job.yaml", 2000)}[name]
    (tmp_path / "train.py").write_text(SCRIPTS[name])
    (tmp_path / "job.yaml").write_text(block("yaml", job, text))
    [command] = re.findall(r"^surefoot local .*--compare$", text, re.MULTILINE)
    output = run(command, tmp_path)
    assert f"Complete: {steps} steps" in output
    assert "samples lost 0, repeated 0" in output
    [difference] = re.findall(r"^largest loss difference to the undisturbed run (\S+)", output, re.MULTILINE)
    # another world size adds up float32 numbers in another order; a loss that is weighted twice differs by 0.05
    assert float(difference) < 1e-5
    for command in re.findall(r"^surefoot local .*--report.*$", text, re.MULTILINE):
        run(command, tmp_path)
        assert "trainer-failed" in (tmp_path / "run.html").read_text(encoding="utf-8")
