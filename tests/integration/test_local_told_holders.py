"""`surefoot local` whose agents are told of the holders that they need, as where there are many."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_equal, assert_little_lost, assert_whole, faults, run

AS_MANY = """
import os
from surefoot.agent import state_machine
from surefoot_operator.coordinator import desired_messages

desired_messages.SEND_ALL_UP_TO_SERVERS = 0
request_all_servers = state_machine.request_all_servers

def noted(epoch):
    with open(os.environ["ASKED"], "a", encoding="utf-8") as file:
        file.write(f"{epoch}\\n")
    return request_all_servers(epoch)

state_machine.request_all_servers = noted
"""
"""Read by every Python process of the run: three holders are told of like three thousand, and who asks for all is noted."""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_ranks_restore_what_lies_on_holders_that_their_agents_were_not_told_of(tmp_path: Path) -> None:
    (tmp_path / "patched").mkdir()
    (tmp_path / "patched" / "sitecustomize.py").write_text(AS_MANY, encoding="utf-8")
    environment = {"PYTHONPATH": str(tmp_path / "patched"), "ASKED": str(tmp_path / "asked")}
    # one copy each: the last two ranks read what the other of them saved, and it is on neither's targets
    job = Job(steps=120, workers=3, memory={"replicas": 1}, trainer=("--pace", "0.05"), environment=environment)
    report = run(tmp_path, job, *faults("trainer:0@step=60"), "--compare").report
    assert_whole(report, 120)
    assert_equal(report)
    (incident,) = [one for one in report["incidents"] if one["fault"]]
    assert_little_lost([incident])
    assert "memory" in incident["restored_from"]
    assert (tmp_path / "asked").read_text(encoding="utf-8").split() == ["2", "2"]
