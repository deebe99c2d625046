"""The runtime's image trains, read-only, by its own user; so does one of somebody's own that took surefoot in three lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from images.build import PROJECT
from images.conftest import Built
from images.containers import Containers

pytestmark = pytest.mark.timeout(
    2400
)  # the first test waits for the build; torch's image takes minutes when it is cold

WRITABLE = ("--tmpfs", "/tmp:mode=1777,size=2g", "--shm-size", "1g")
THREE_STEPS = ("python", "examples/gpt.py", "--steps", "3", "--checkpoints", "/tmp/checkpoints")
# somebody's image: torch and a Python with pip, nothing of ours
STRANGERS = """
FROM {runtime}
USER 0:0
RUN python -m ensurepip && python -m pip uninstall --yes surefoot
RUN ln -s pip3 /opt/surefoot/bin/pip
USER 1000:1000
"""


def test_a_gpt_trains_on_three_nodes_in_it_and_one_dies(built: Built, containers: Containers) -> None:
    fault = ("--fault", "node:1@step=20,for=1")
    local = ("surefoot", "local", "-f", "examples/gpt.yaml", "--nodes", "3", "--run-folder", "/tmp/run", *fault)
    said = containers.run(built.runtime, *local, options=WRITABLE, seconds=600)
    assert said.code == 0, said.text
    assert "samples lost 0, repeated 0" in said.text
    assert "node-lost: node node-1" in said.text
    assert "Complete: 90 steps" in said.text


@pytest.mark.parametrize("name", ["minimal", "elastic"])
def test_an_example_trains_in_it_as_it_is(built: Built, containers: Containers, tmp_path: Path, name: str) -> None:
    """Its command, in the image that it names; fewer steps."""
    text = (PROJECT / "examples" / "cluster" / f"{name}.yaml").read_text("utf-8")
    assert f"image: {built.runtime}\n" in text
    file = tmp_path / "job.yaml"
    file.write_text(re.sub(r'--steps, "\d+"', '--steps, "12"', text))
    file.chmod(0o644)
    local = ("surefoot", "local", "-f", "/job.yaml", "--run-folder", "/tmp/run")
    said = containers.run(built.runtime, *local, options=(*WRITABLE, "--volume", f"{file}:/job.yaml:ro"), seconds=400)
    assert "Complete: 12 steps" in said.text, said.text


def test_one_process_trains_in_it_with_nothing_around(built: Built, containers: Containers) -> None:
    said = containers.run(built.runtime, *THREE_STEPS, options=WRITABLE, seconds=200)
    assert "step 3  loss" in said.text
    say = "import os; print(os.getuid(), os.getgid())"
    assert containers.run(built.runtime, "python", "-c", say).text.strip() == "1000 1000"


def test_it_says_what_the_agent_wants(built: Built, containers: Containers) -> None:
    said = containers.run(built.runtime)
    assert (said.code, "surefoot-agent -- COMMAND" in said.text) == (2, True)


def test_three_lines_bring_surefoot_into_an_image_that_has_torch(
    built: Built, containers: Containers, tmp_path: Path
) -> None:
    """The three lines of docs/install.md, on an image that is not ours; its torch is left as it is."""
    strangers, theirs = "surefoot-test/strangers:1", "surefoot-test/theirs:1"
    try:
        _build(built, tmp_path / "strangers", STRANGERS.format(runtime=built.runtime), strangers)
        assert "No module named 'surefoot'" in containers.run(strangers, "python", "-c", "import surefoot").text
        lines = _three_lines().replace("your/image-with-torch:1", strangers)
        lines = re.sub(r"surefoot/operator:\S+", built.operator, lines).replace("\nRUN", "\nUSER 0:0\nRUN")
        _build(built, tmp_path / "theirs", f"{lines}\nUSER 1000:1000\n", theirs)
        assert "step 3  loss" in containers.run(theirs, *THREE_STEPS, options=WRITABLE, seconds=200).text
        assert containers.run(theirs, "surefoot-agent").code == 2
    finally:
        built.docker.tried("image", "rm", "--force", theirs, strangers)


def _three_lines() -> str:
    [block] = re.findall(r"```dockerfile\n(.*?)\n```", (PROJECT / "docs/install.md").read_text("utf-8"), re.DOTALL)
    assert len(block.splitlines()) == 3
    return str(block)


def _build(built: Built, folder: Path, dockerfile: str, image: str) -> None:
    folder.mkdir()
    (folder / "Dockerfile").write_text(dockerfile)
    network = () if built.docker.can_bridge else ("--network", "none")
    built.docker.run("build", *network, "--tag", image, str(folder), seconds=900)
