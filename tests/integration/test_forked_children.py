"""A child that a rank forks does not speak for it, however it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.ipc.agent_client import AgentBackend
from surefoot.ipc.trainer_messages import FrameDecoder
from surefoot.launcher.job_program import LaunchProgram, run_program

TRAINER = Path(__file__).parents[1] / "support" / "programs" / "forking_trainer.py"


@pytest.mark.timeout(280)
def test_children_that_end_close_nothing_of_their_parents(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(TRAINER), "8", str(tmp_path / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "saved 8"
    assert done.stdout.count("refused: step() was called in process") == 2
    assert done.stderr.count("did not reach its tiers") == 0


def in_a_child(work: object) -> int:
    """Exit code of a fork of this process that does so."""
    pid = os.fork()
    if pid == 0:
        try:
            work()  # type: ignore[operator]
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_childs_end_of_the_line_is_closed_and_its_parents_is_not() -> None:
    ours, theirs = socket.socketpair()
    link = AgentBackend(ours)
    link._reader.start()
    try:
        assert in_a_child(link.disable_after_fork) == 0
        link.report_notice("Told", "still here")
        theirs.settimeout(60)
        (text,) = FrameDecoder().add_bytes(theirs.recv(1 << 16))
        assert "still here" in text.decode() if isinstance(text, bytes) else "still here" in text
    finally:
        theirs.close()
        link.close(0)


@pytest.mark.parametrize("ends", ["raise RuntimeError('mine')", "raise SystemExit('mine')"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_childs_error_is_not_written_down_as_its_ranks(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, script = tmp_path / "error.json", tmp_path / "program.py"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    script.write_text(
        f"import os\npid = os.fork()\nif pid == 0:\n    {ends}\n_, code = os.waitpid(pid, 0)\nassert code\nos._exit(7)\n"
    )

    def work() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        run_program(LaunchProgram((), str(script), None))

    assert in_a_child(work) == 7
    assert not report.exists()
