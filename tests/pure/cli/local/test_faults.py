"""Tests of `cli.local.faults`."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from surefoot_operator.api.spec import HealthPolicy
from surefoot_operator.cli import run_local
from surefoot_operator.cli.checkpoints import try_file, try_folder
from surefoot_operator.cli.command_base import UsageError
from surefoot_operator.cli.local.faults import (
    KINDS,
    Fault,
    FaultError,
    FaultInjector,
    check_faults,
    parse_fault,
    parse_faults,
)
from surefoot_operator.cli.main import main

# ---- faults ----------------------------------------------------------------------------------------------------------
# What a person may ask to go wrong, and when it does.

NODES = ("node-0", "node-1", "node-2")


@pytest.mark.parametrize(
    ("text", "fault", "sentence"),
    [
        ("node:1@step=40,for=12", Fault("node", "node-1", 40, 12.0), "kill node-1 at step 40, returns after 12 s"),
        ("node:node-2@step=1", Fault("node", "node-2", 1, None), "kill node-2 at step 1"),
        ("trainer:0@step=7", Fault("trainer", "node-0", 7, None), "kill trainer of node-0 at step 7"),
        ("agent:0@step=7", Fault("agent", "node-0", 7, None), "kill agent of node-0 at step 7"),
        ("freeze:2@step=9", Fault("freeze", "node-2", 9, 5.0), "freeze node-2 at step 9, thaws after 5 s"),
        ("freeze:2@step=9,for=0.5", Fault("freeze", "node-2", 9, 0.5), "freeze node-2 at step 9, thaws after 0.5 s"),
        (
            "memory:1@step=3,for=2",
            Fault("memory", "node-1", 3, 2.0),
            "kill memory of node-1 at step 3, returns after 2 s",
        ),
        (
            "drain:1@step=3,for=2",
            Fault("drain", "node-1", 3, 2.0),
            "drain node-1 at step 3, takes workers again after 2 s",
        ),
        ("drain:1@step=3", Fault("drain", "node-1", 3, None), "drain node-1 at step 3"),
        ("nan:1@step=9", Fault("nan", "node-1", 9, None), "turn the model of node-1 NaN at step 9"),
        (
            "sick:1@step=9",
            Fault("sick", "node-1", 9, None),
            "make node-1 compute wrong results, which its next node test finds, from step 9",
        ),
        ("cordon:1@step=3", Fault("cordon", "node-1", 3, None), "cordon node-1 at step 3"),
        (
            "cordon:1@step=3,for=2",
            Fault("cordon", "node-1", 3, 2.0),
            "cordon node-1 at step 3, takes workers again after 2 s",
        ),
        ("hang:1@step=3", Fault("hang", "node-1", 3, None), "have a trainer of node-1 hang at step 3"),
        (
            "hang:1@step=3,for=2",
            Fault("hang", "node-1", 3, 2.0),
            "have a trainer of node-1 hang at step 3, continues after 2 s",
        ),
        ("oom:0@step=7", Fault("oom", "node-0", 7, None), "have the OOM killer end a trainer of node-0 at step 7"),
        (
            "diskfull:2@step=7,for=15",
            Fault("diskfull", "node-2", 7, 15.0),
            "have the disk of node-2 be full from step 7, has room again after 15 s",
        ),
        ("coordinator@step=5", Fault("coordinator", None, 5, 2.0), "kill coordinator at step 5, returns after 2 s"),
    ],
)
def test_a_fault_reads_as_it_is_written(text: str, fault: Fault, sentence: str) -> None:
    assert parse_fault(text, NODES) == fault
    assert str(fault) == sentence


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is allowed"),
        ("node:1", "is allowed"),
        ("node:1@step=x", "is allowed"),
        ("meteor:1@step=4", "'meteor' is not a kind of fault"),
        ("node@step=4", "which node"),
        ("drain@step=4", "which node? write drain:NODE@step=N"),
        ("drain:1@step=4,for=0", "above 0"),
        ("node:3@step=4", "there is no node 3; nodes are node-0, node-1, node-2"),
        ("coordinator:1@step=4", "on no node"),
        ("node:1@step=0", "count from 1"),
        ("node:1@step=4,for=-1", "above 0"),
        ("node:1@step=4,for=inf", "above 0"),
        ("node:1@step=4,for=soon", "above 0"),
        ("trainer:1@step=4,for=3", "does not return by itself"),
        ("nan:1@step=4,for=3", "does not return by itself"),
        ("oom:1@step=4,for=3", "what oom strikes does not return by itself"),
        ("diskfull:1@step=4,for=3", "give for=12 or more"),
        ("cordon@step=4", "which node? write cordon:NODE@step=N"),
        ("hang:1@step=4,for=0", "above 0"),
    ],
)
def test_a_fault_that_cannot_be_says_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(FaultError, match="--fault") as caught:
        parse_fault(text, NODES)
    assert said in str(caught.value)


def test_a_node_is_sick_to_nobody_where_none_is_tried() -> None:
    sick = parse_faults(["sick:1@step=4", "node:0@step=2"], NODES)
    with pytest.raises(FaultError, match=r"--fault sick: this job tests no node.*preJoinCheck to Enforce"):
        check_faults(sick, HealthPolicy())
    check_faults(sick, HealthPolicy(pre_join_check="Warn"))
    check_faults(sick[:1], HealthPolicy())


class FakeMachine(SimpleNamespace):
    """Nodes that can be cordoned, and trainers that run on `busy` nodes alone."""

    def __init__(self) -> None:
        super().__init__(calls=[], busy={"node-0", "node-1"})

    def kill_trainer(self, node: str) -> bool:
        self.calls.append(f"trainer {node}")
        return node in self.busy

    def inject_trainer_fault(self, node: str, kind: str, text: str = "") -> bool:
        self.calls.append(f"{kind} {node} {text}")
        return True

    def cancel_fault(self, node: str, kind: str) -> None:
        self.calls.append(f"{kind} {node} taken back")


def injector(*texts: str) -> tuple[FaultInjector, FakeMachine, list[str]]:
    told: list[str] = []
    machine: Any = FakeMachine()
    return FaultInjector(parse_faults(texts, NODES), machine, lambda text, _: told.append(text)), machine, told


def test_each_fault_strikes_once_in_the_order_of_its_step() -> None:
    faults, machine, told = injector("trainer:1@step=9", "trainer:0@step=4", "trainer:0@step=4")
    assert [fault.step for fault in faults.pending] == [4, 4, 9]
    faults.tick(3)
    assert machine.calls == []
    faults.tick(4)
    faults.tick(5)
    assert machine.calls == ["trainer node-0", "trainer node-0"]
    faults.tick(9)
    assert machine.calls[2:] == ["trainer node-1"]
    assert [(struck.fault.node, struck.step) for struck in faults.struck] == [
        ("node-0", 4),
        ("node-0", 4),
        ("node-1", 9),
    ]
    assert told == [f"fault: {struck.fault}" for struck in faults.struck]
    assert faults.pending == []


def test_a_fault_with_nothing_to_strike_is_tried_again() -> None:
    faults, machine, told = injector("trainer:2@step=4")
    faults.tick(4)
    assert (told, len(faults.pending)) == ([], 1)
    machine.busy.add("node-2")
    faults.tick(5)
    assert (len(told), faults.pending, faults.struck[0].step) == (1, [], 5)


def test_a_fault_that_is_over_is_taken_back_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("surefoot_operator.cli.local.faults.time.monotonic", lambda: now)
    faults, machine, told = injector("hang:1@step=3,for=2", "hang:1@step=3,for=5")
    faults.tick(3)
    assert machine.calls == ["hang node-1 2.0"]
    assert faults.any_returns
    now = 102.0
    faults.tick(3)
    assert machine.calls[1:] == ["hang node-1 taken back"]
    assert told[1:] == ["the rank that hangs on node-1 continues"]
    faults.tick(3)
    assert machine.calls[2:] == ["hang node-1 5.0"], "the second waited until the first was over"


@pytest.mark.parametrize(
    ("text", "before", "waits"),
    [
        ("agent:1@step=4", "node:1@step=4,for=9", True),
        ("agent:1@step=4", "freeze:1@step=4,for=9", True),
        ("agent:1@step=4", "drain:1@step=4,for=9", True),
        ("agent:2@step=4", "node:1@step=4,for=9", False),
        ("agent:1@step=4", "cordon:1@step=4,for=9", False),
        ("cordon:1@step=4", "cordon:1@step=4,for=9", True),
        ("trainer:1@step=4", "slow:1@step=4,for=9", False),
        ("trainer:1@step=4", "diskfull:1@step=4,for=19", False),
        ("trainer:1@step=4", "hang:1@step=4,for=9", False),
        ("coordinator@step=9", "coordinator@step=4", True),
    ],
)
def test_a_fault_waits_for_one_that_left_it_nothing_to_strike(text: str, before: str, waits: bool) -> None:
    assert parse_fault(text, NODES).waits_for(parse_fault(before, NODES)) == waits


def test_whatever_is_over_says_so() -> None:
    said = [
        parse_fault(text, NODES).end_sentence
        for text in ("cordon:1@step=4,for=1", "memory:1@step=4,for=1", "coordinator@step=4")
    ]
    assert said == ["node-1 takes workers again", "the memory of node-1 returns", "the coordinator returns"]
    assert all(("{target} " in kind.end_sentence) == (kind.end is not None) for kind in KINDS.values())


# ---- inputs ----------------------------------------------------------------------------------------------------------
# What a person gives the command on its line: tried before anything runs, refused in one short sentence.

JOB: dict[str, Any] = {
    "apiVersion": "surefoot.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "tiny"},
    "spec": {
        "replicas": 2,
        "template": {"spec": {"containers": [{"name": "trainer", "command": ["python", "train.py"]}]}},
    },
}


def job(folder: Path, **spec: object) -> Path:
    body = copy.deepcopy(JOB)
    body["spec"] |= spec
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


def refusal(*arguments: str) -> str:
    parser = argparse.ArgumentParser()
    run_local.add_local_arguments(parser)
    with pytest.raises(UsageError) as caught:
        run_local.check(parser.parse_args(arguments))
    return str(caught.value)


@pytest.mark.parametrize("given", [[], ["--nodes", "100000"]])
def test_a_machine_is_not_asked_for_a_hundred_thousand_nodes(tmp_path: Path, given: list[str]) -> None:
    path = job(tmp_path, replicas=100_000)
    said = refusal("-f", str(path), *given)
    assert "at most 64 nodes and 512 ranks are allowed" in said


def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    path = job(tmp_path)
    (tmp_path / "file").write_text("mine")
    for report, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "report.json", "cannot be written"),
        (Path("/proc/report.json"), "cannot be written"),
        (tmp_path / ("n" * 300), "cannot be written"),
    ):
        assert said in refusal("-f", str(path), "--report", str(report))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_folder_that_cannot_be_used_is_refused_before_the_run(tmp_path: Path) -> None:
    path = job(tmp_path)
    (tmp_path / "file").write_text("mine")
    for folder, said in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "run", "cannot be written to"),
        (Path("/proc/run"), "cannot be written to"),
        (tmp_path / ("n" * 300), "cannot be written to"),
    ):
        assert said in refusal("-f", str(path), "--run-folder", str(folder))
    assert (tmp_path / "file").read_text() == "mine"


def test_trying_leaves_things_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("a former report")
    try_file("--report", tmp_path / "old.json")
    try_file("--report", tmp_path / "new" / "report.json")
    assert (tmp_path / "old.json").read_text() == "a former report"
    assert not (tmp_path / "new" / "report.json").exists()
    try_folder("--run-folder", tmp_path / "a" / "run")
    assert list((tmp_path / "a" / "run").iterdir()) == []
    assert (tmp_path / "a" / "run").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "text",
    ["x" * 100_000, "node:" + "n" * 100_000 + "@step=3", "node:1@step=" + "9" * 5000, "freeze:1@step=3,for=" + "z" * 90_000,
     "node:\x1b[2J@step=3"],
)  # fmt: skip
def test_a_fault_that_cannot_be_is_refused_with_a_glance_of_it(text: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_fault(text, tuple(f"node-{n}" for n in range(64)))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\x00" * 100, b"kind: \xed\xa0\x80", b"a" * (2 << 20)])
def test_a_file_that_holds_anything_is_one_line_and_no_traceback(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job \x1b[31m.yaml"
    path.write_bytes(content)
    assert main(["validate", "-f", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "\x1b" not in said


@pytest.mark.parametrize("path", ["/dev/zero", "/", "/no/such/file"])
def test_what_is_no_file_is_refused(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "-f", path]) == 2
    assert capsys.readouterr().err.startswith(f"surefoot: {path}")


@pytest.mark.parametrize("action", ["list", "verify", "export", "import", "delete"])
def test_each_action_on_checkpoints_has_help_and_an_example_of_its_own(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoints", action, "--help"])
    said = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"surefoot checkpoints {action} " in said.split("examples:")[1]
    assert ("--to" in said, "--from" in said, "--yes" in said) == (
        action == "export",
        action == "import",
        action == "delete",
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "needs either a folder or URI, or -f JOB.yaml"),
        (["a", "-f", "b"], "either a folder"),
        (["/no/such"], "is not a folder"),
        (["http://x"], "file:///folder or s3://bucket/prefix is allowed"),
    ],
)
def test_checkpoints_are_looked_for_at_one_place(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", "list", *given]) == 2
    assert said in capsys.readouterr().err


def test_what_is_deleted_is_never_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "delete", str(tmp_path), "--yes"]) == 2
    assert "delete needs --job UID" in capsys.readouterr().err
