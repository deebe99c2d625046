"""What README.md, docs/python.md and the tutorial show runs as it stands there: the script, its job, and each command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.machine_speed import scaled

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
SECONDS = scaled(240)


def block(kind: str, first: str, page: str = PAGE) -> str:
    """The fenced block whose first line begins so."""
    return next(
        b for b in re.findall(rf"^```{kind}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE) if b.startswith(first)
    )


def run(command: str, folder: Path) -> str:
    """A documented command in a folder that has the documented script and job, and nothing else of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SUREFOOT_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    ended = subprocess.run(
        command,
        shell=True,
        check=False,
        cwd=folder,
        env={**kept, "PATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(block("python", "# train.py"))
    (tmp_path / "job.yaml").write_text(block("yaml", "# job.yaml"))
    return tmp_path


def test_the_readme_shows_the_same_script_and_commands() -> None:
    assert block("python", "# train.py", README) == block("python", "# train.py")
    for line in block("sh", "python train.py", README).splitlines():
        assert f"```sh\n{line.partition('#')[0].strip()}\n```" in PAGE


def test_by_itself_it_says_where_its_checkpoints_are_and_goes_on_from_them(folder: Path) -> None:
    first = run(block("sh", "python"), folder)
    assert "continuing from step 0\n" in first
    place = f"checkpoints go to {folder}/surefoot-checkpoints/train/default"
    assert first.count(f"{place}; this run begins at step 0") == 1
    # the same checkpoints, on two ranks: said once, and all steps are done
    again = run(block("sh", "torchrun --nproc"), folder)
    assert again.count("continuing from step 200") == 2  # two ranks write to one pipe: lines may run into each other
    assert again.count(f"{place}; this run continues from step 200 of the run begun with `train.py`") == 1


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
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("page", ["README", pytest.param("tutorial", marks=pytest.mark.nightly)])
def test_the_documented_job_as_pasted_ends_and_equals_the_undisturbed_run(page: str, folder: Path) -> None:
    """Script, job and command of one page, without credentials, network, or anything else of ours."""
    text, first_line = {"README": (README, "apiVersion"), "tutorial": (TUTORIAL, "# job.yaml")}[page]
    (folder / "job.yaml").write_text(block("yaml", first_line, text))
    [command] = re.findall(r"^surefoot local .*--compare$", text, re.MULTILINE)
    output = run(command, folder)
    assert "Complete: 200 steps" in output
    assert "samples lost 0, repeated 0" in output
    [difference] = re.findall(r"^largest loss difference to the undisturbed run (\S+)", output, re.MULTILINE)
    # another world size adds up float32 numbers in another order; a loss that is weighted twice differs by 0.05
    assert float(difference) < 1e-5
    for command in re.findall(r"^surefoot local .*--report.*$", text, re.MULTILINE):
        run(command, folder)
        assert "trainer-failed" in (folder / "run.html").read_text(encoding="utf-8")
