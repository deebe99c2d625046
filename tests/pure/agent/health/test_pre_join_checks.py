"""What an agent makes of the trials of its node, and when it does not try again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from surefoot.agent.health import pre_join_checks
from surefoot.agent.health.pre_join_checks import KEPT_SECONDS, JoinCheck, NodeTestProcess
from surefoot.node_tests.host_tests import NodeTestResult
from surefoot.protocol.messages import NodeFinding

OVER = '{"over": true}'
WELL = NodeTestResult("matmul", "well", rate=50.0, unit="GFLOP")
WRONG = NodeTestResult("matmul", "fails", "CpuComputeError", "the processor multiplies wrong")
UNTRIED = NodeTestResult("disk", "unknown", text="it is full")


class Node:
    """A probe that answers what it is told to."""

    def __init__(self, *trials: NodeTestResult, over: bool = True) -> None:
        self.lines = [*(json.dumps(asdict(one)) for one in trials), *([OVER] if over else [])]
        self.tries, self.now = 0, 1000.0

    def __call__(self) -> Sequence[str]:
        self.tries += 1
        return self.lines

    def find(self, folder: Path, blamed: bool = True, node: str = "n0") -> list[NodeFinding]:
        """As another agent does on each call."""
        return list(JoinCheck(node, folder, blamed, self, lambda: self.now).find_faults())


def test_what_fails_is_a_finding_and_names_the_node_where_it_may(tmp_path: Path) -> None:
    node = Node(UNTRIED, WELL, WRONG)
    assert node.find(tmp_path) == [NodeFinding("CpuComputeError", "the processor multiplies wrong", "node")]
    assert node.find(tmp_path, blamed=False)[0].blame == "unknown"
    assert node.tries == 2, "a node that fails is tried by each who comes"


def test_a_node_that_is_well_is_not_tried_again_for_hours(tmp_path: Path) -> None:
    node = Node(WELL, UNTRIED)
    assert node.find(tmp_path) == []
    node.now += KEPT_SECONDS - 1
    assert node.find(tmp_path) == []
    assert node.tries == 1
    assert node.find(tmp_path, node="n1") == []
    assert node.tries == 2, "another node's folder may be the same one"
    node.now += 2
    node.find(tmp_path)
    assert node.tries == 3


def test_it_is_tried_again_behind_a_reboot_and_where_the_note_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(WELL)
    node.find(tmp_path)
    boot = tmp_path / "boot"
    boot.write_text("another")
    monkeypatch.setattr(pre_join_checks, "_BOOT", boot)
    node.find(tmp_path)
    assert node.tries == 2
    (tmp_path / "join-check-n0.json").write_text('{"boot": 7}')
    node.find(tmp_path)
    (tmp_path / "join-check-n0.json").write_text("half of")
    node.find(tmp_path)
    assert node.tries == 4


@pytest.mark.parametrize(
    ("node", "after"), [(Node(WELL, over=False), "matmul"), (Node(over=False), "nothing")], ids=["cut off", "at once"]
)
def test_what_did_not_come_in_time_proves_nothing_is_told_and_not_kept(node: Node, after: str, tmp_path: Path) -> None:
    """`node_monitor` tells people what a check raised, once."""
    for _ in range(2):
        with pytest.raises(ChildProcessError, match=f"ended early, after {after}: .* the worker joins"):
            node.find(tmp_path)
    assert node.tries == 2
    node.lines.append('{"ended": "was ended by signal 11"}')
    with pytest.raises(ChildProcessError, match="was ended by signal 11, after"):
        node.find(tmp_path)


def test_what_failed_before_the_time_was_over_counts(tmp_path: Path) -> None:
    assert [one.reason for one in Node(WRONG, over=False).find(tmp_path)] == ["CpuComputeError"]


def test_a_folder_that_takes_no_note_is_no_fault(tmp_path: Path) -> None:
    node = Node(WELL)
    assert node.find(tmp_path / "absent") == []
    assert node.find(tmp_path / "absent") == []
    assert node.tries == 2


def test_the_real_probe_is_one_process_within_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = NodeTestProcess("127.0.0.1", tmp_path, os.environ)
    assert JoinCheck("n0", tmp_path, True, probe).find_faults() == []
    assert probe.own() == set()
    assert (tmp_path / "join-check-n0.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["join-check-n0.json"], "nothing else is left"
    monkeypatch.setattr(pre_join_checks, "LIMIT_SECONDS", 0.01)
    monkeypatch.setattr(probe, "_command", [sys.executable, "-c", "import time; time.sleep(60)"])
    assert [json.loads(line)["ended"] for line in probe()] == ["took longer than 0.01 s"]
    assert probe.own() == set()
    monkeypatch.setattr(pre_join_checks, "LIMIT_SECONDS", 60.0)
    monkeypatch.setattr(probe, "_command", [sys.executable, "-c", "import os; print('{}', flush=True); os.abort()"])
    assert [json.loads(line) for line in probe()] == [{}, {"ended": "was ended by signal 6"}]
