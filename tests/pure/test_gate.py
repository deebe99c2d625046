"""The gate runs its stages in order, reports the first failure at once, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gate import __main__ as gate_main
from gate.nightly_rows import ROWS, is_left_to_the_night, table
from gate.runner import Result, Runner
from gate.stages import GATE, NIGHTLY, Lane, Stage
from gate.summary import counts, failures
from support.machine_speed import scaled

TESTS = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TESTS)}


def shell(name: str, script: str) -> Stage:
    return Stage(name, ("sh", "-c", script))


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("gate.runner.ROOT", tmp_path)
    return tmp_path


def outcomes(runner: Runner, *lanes: Lane) -> dict[str, str]:
    return {name: result.outcome for name, result in runner.run(lanes, frozenset(), frozenset()).items()}


def test_a_lane_runs_in_order_and_after_the_lanes_that_it_waits_for(logs: Path) -> None:
    order = logs / "order"
    lanes = (
        Lane("late", (shell("c", f"echo c >>{order}"),), after=frozenset({"early"})),
        Lane("early", (shell("a", f"echo a >>{order}"), shell("b", f"echo b >>{order}"))),
    )
    assert set(outcomes(Runner(logs, ENVIRONMENT, keep_going=False), *lanes).values()) == {"passed"}
    assert order.read_text().split() == ["a", "b", "c"]


def test_the_first_failure_ends_the_others_and_nothing_further_begins(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lanes = (
        Lane(
            "fails",
            (
                shell("bad", f"until test -e {logs}/begun; do sleep 0.01; done; echo broken; exit 3"),
                shell("next", "true"),
            ),
        ),
        Lane("waits", (shell("long", f"touch {logs}/begun; exec sleep 600"),)),
    )
    results = Runner(logs, ENVIRONMENT, keep_going=False).run(lanes, frozenset(), frozenset())
    assert {name: result.outcome for name, result in results.items()} == {
        "bad": "failed",
        "next": "not run",
        "long": "stopped",
    }
    assert "exit code 3" in results["bad"].why
    assert results["next"].why == "bad failed"
    output = capsys.readouterr().out
    assert "bad | broken" in output
    assert (logs / "bad.log").read_text() == "broken\n"


def test_all_stages_run_whatever_fails_where_that_is_asked_for(logs: Path) -> None:
    lane = Lane("one", (shell("bad", "exit 1"), shell("good", "true")))
    assert outcomes(Runner(logs, ENVIRONMENT, keep_going=True), lane) == {"bad": "failed", "good": "passed"}


def test_what_a_stage_leaves_in_the_background_ends_with_it(logs: Path) -> None:
    lane = Lane("one", (shell("leaves", f"sleep 600 >/dev/null 2>&1 & echo $! >{logs}/pid"),))
    assert outcomes(Runner(logs, ENVIRONMENT, keep_going=False), lane) == {"leaves": "passed"}
    pid = (logs / "pid").read_text().strip()
    deadline = time.monotonic() + scaled(20)
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_every_stage(tmp_path: Path, number: signal.Signals) -> None:
    program = f"""
import os, sys
from pathlib import Path
from gate.runner import Runner
from gate.stages import Lane, Stage
import gate.runner
logs = gate.runner.ROOT = Path({str(tmp_path)!r})
lane = Lane("one", (Stage("long", ("sh", "-c", "echo $$ >{tmp_path}/pid; exec sleep 600")), Stage("next", ("true",))))
results = Runner(logs, dict(os.environ), keep_going=True).run((lane,), frozenset(), frozenset())
print({{name: result.outcome for name, result in results.items()}})
"""
    process = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-c", program],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + scaled(60)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=scaled(60))
    assert "{'long': 'stopped', 'next': 'not run'}" in output
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_the_cpu_time_of_a_stage_counts_what_its_children_used(logs: Path) -> None:
    burn = f"{sys.executable} -c 'import time\nwhile time.process_time() < 0.5: pass'"
    results = Runner(logs, ENVIRONMENT, keep_going=False).run(
        (Lane("one", (shell("burns", burn),)),), frozenset(), frozenset()
    )
    assert results["burns"].cpu_seconds >= 0.5


def test_results_are_counted_from_junit_files(tmp_path: Path) -> None:
    file = tmp_path / "a.xml"
    file.write_text('<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>')
    assert counts([file, tmp_path / "none.xml"]) == (5, 2, 2)


def test_each_failed_test_has_a_line_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "a.xml"
    file.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.pure.test_a" name="test_b[1]"><failure message="assert 1 == 2&#10;more">x</failure></testcase>'
        '<testcase classname="tests.pure.test_a" name="test_c"><error message="no server">x</error></testcase>'
        '<testcase classname="tests.pure.test_a" name="test_d"/>'
        "</testsuite></testsuites>"
    )
    assert failures(file) == [
        "tests.pure.test_a::test_b[1]: assert 1 == 2",
        "tests.pure.test_a::test_c: no server",
    ]
    assert failures(tmp_path / "none.xml") == []


def test_every_stage_has_a_name_of_its_own_and_every_nightly_one_a_reason() -> None:
    names = [stage.name for lane in (*GATE, *NIGHTLY) for stage in lane.stages]
    assert len(names) == len(set(names))
    assert all(stage.why_nightly for lane in NIGHTLY for stage in lane.stages)
    lanes = {lane.name for lane in (*GATE, *NIGHTLY)}
    assert all(lane.after <= lanes for lane in (*GATE, *NIGHTLY))


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"{rows.file}::{rows.tests}")
def test_what_is_left_to_the_night_is_there_and_is_covered_in_the_gate(rows) -> None:  # type: ignore[no-untyped-def]
    functions = re.findall(r"^(?:async )?def (test_\w+)", (TESTS / rows.file).read_text(), re.MULTILINE)
    pattern = rows.tests.partition(r"\[")[0]
    assert any(re.match(rows.tests, name) or re.fullmatch(pattern, name) for name in functions), rows
    assert rows.covered_by, "name the faster test that finds the same class of defect"
    for cover in rows.covered_by:
        file, _, name = cover.partition("::")
        text = (TESTS / file).read_text()
        assert re.search(rf"^(?:async )?def {name}\b", text, re.MULTILINE), cover
        assert f"pytest.mark.nightly\ndef {name}" not in text, f"{cover} is nightly itself"
        assert not is_left_to_the_night(file, name), f"{cover} is left to the night too"


def test_the_readme_shows_what_leaves_the_gate() -> None:
    assert table() in (TESTS / "README.md").read_text(encoding="utf-8"), "write table() into tests/README.md"


def test_a_nightly_run_belongs_to_the_commit_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rewrites tried.json, a file of the tree: its own change must not make its results those of no commit."""
    changed: list[bool] = []
    record = tmp_path / "nightly.json"
    monkeypatch.setattr(sys, "argv", ["gate", "--nightly"])
    monkeypatch.setattr(gate_main, "die_with_parent", lambda *_: None)
    monkeypatch.setattr(gate_main, "NIGHTLY_RECORD", record)
    monkeypatch.setattr(gate_main, "_commit", lambda: "abc" + "+changes" * len(changed))
    monkeypatch.setattr(gate_main, "write_tried", lambda: changed.append(True))
    monkeypatch.setattr(gate_main.Runner, "run", lambda *_, **__: {"nightly-simulation": Result("passed")})
    assert gate_main.main() == 0
    assert changed
    assert json.loads(record.read_text())["commit"] == "abc"
