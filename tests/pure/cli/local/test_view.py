"""What people watch while a run lasts: how far, how fast, why it waits, and no rank that is gone."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.spec import TOTAL_STEPS
from surefoot_operator.api.status import JobStatus, Member, Membership
from surefoot_operator.cli.command_base import UsageError
from surefoot_operator.cli.local import view
from surefoot_operator.cli.local.progress import LedgerEntry
from surefoot_operator.cli.local.view import (
    RANK_0,
    ProgressRate,
    Row,
    RunSnapshot,
    TrainerOutput,
    draw,
    newest_of,
    phase_of,
)
from surefoot_operator.cli.run_local import _total_steps

WORLD = Membership(2, "Committed", world_size=2, members=(Member(0, 1, "a", "node-0"),), changed_seconds=100.0)
RUNNING = RunSnapshot(
    "gpt",
    JobStatus(phase="Running", message="epoch 2 runs", membership=WORLD, last_complete=Checkpoint(1, 35)),
    40,
    160,
    4.0,
    1.25,
    1.5,
)


def test_a_rank_that_had_another_number_in_an_older_epoch_is_shown_once() -> None:
    ranks = {0: LedgerEntry(1, 6, 0, 1.9, None, 0.0), 1: LedgerEntry(2, 40, 1, 1.2, None, 0.0)}
    assert [(line.rank, line.step) for line in newest_of(ranks, WORLD)] == [(1, 40)]
    assert newest_of(ranks, None) == ()


@pytest.mark.parametrize(
    ("world", "member", "words"),
    [
        (None, False, "warming up (importing torch and the program's modules) or waiting to join, since 12s"),
        (WORLD, True, "restoring and making its first step, since 7s"),
        (Membership(3, "Claimed", changed_seconds=100.0), True, "stopped until the new world begins, since 7s"),
        (WORLD, False, "warming up (importing torch and the program's modules) or waiting to join, since 12s"),
    ],
)
def test_a_worker_without_a_step_says_what_it_is_busy_with(world: Membership | None, member: bool, words: str) -> None:
    assert phase_of(world, member, created_seconds=95.0, now=107.0) == words


def test_pace_is_of_the_present_world_and_slows_down_when_nothing_comes() -> None:
    pace = ProgressRate()
    assert pace.steps_per_second(0.0, 1, 0) is None
    assert pace.steps_per_second(1.0, 1, 1) is None
    assert pace.steps_per_second(2.0, 1, 5) == 4.0
    assert pace.steps_per_second(5.0, 1, 5) == 1.0
    assert pace.steps_per_second(6.0, 2, 30) is None  # restored there: no step was made for it
    assert pace.steps_per_second(8.0, 2, 34) == 2.0
    for second in range(9, 60):
        pace.steps_per_second(second, 2, 34 + 10 * (second - 8))
    assert pace.steps_per_second(60.0, 2, 34 + 10 * 52) == pytest.approx(10.0)


def test_the_headline_says_how_far_how_fast_and_until_when() -> None:
    said = RUNNING.headline()
    assert "step 40 of 160 (25%)" in said
    assert "4 steps/s  30s left" in said
    assert "checkpoint step 35, 1.5 s old" in said


def test_without_a_total_there_is_a_rate_and_no_guess_at_the_end() -> None:
    headline = RunSnapshot("gpt", RUNNING.status, 40, steps_per_second=4.0).headline()
    assert "4 steps/s" in headline
    assert "left" not in headline


def test_what_it_waits_for_is_said_once_for_all_that_wait_alike() -> None:
    rows = (
        Row("node-0", "up", "worker-0-1", "warming up"),
        Row("node-1", "up", "worker-1-1", "warming up"),
        Row("node-2", "up"),
    )
    waiting = RunSnapshot("gpt", JobStatus(phase="Pending", message="waiting for workers"), 0, 160, rows=rows)
    assert waiting.waits() == "worker-0-1, worker-1-1 warming up"
    assert waiting.headline().startswith("gpt  Pending  (waiting for workers)  ")
    assert RUNNING.waits() == ""


@pytest.mark.parametrize(
    ("phase", "training", "shown"),
    [("Running", True, False), ("Running", False, True), ("Recovering", True, True), ("Complete", False, False)],
)
def test_whenever_no_rank_trains_the_headline_has_the_operator_s_own_reason(
    phase: Any, training: bool, shown: bool
) -> None:
    """Also of a job that is Running while its last checkpoint is uploaded for an hour."""
    status = replace(RUNNING.status, phase=phase, message="the last checkpoint is on its way")
    headline = replace(RUNNING, status=status, is_training=training).headline()
    assert ("the last checkpoint is on its way" in headline) == shown


def _print(folder: Path, worker: int, generation: int, rank: int, text: str) -> Path:
    log = folder / f"worker-{worker}-1" / f"epoch-{generation}" / f"rank-{rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8", newline="") as file:
        file.write(text)
    return log


def test_the_output_of_rank_0_is_shown_once_also_when_it_moves_to_another_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "_OUTPUT_SECONDS", 0.0)
    _print(tmp_path, 0, 1, 0, "of a run before\n")
    output = TrainerOutput(tmp_path, RANK_0)
    _print(tmp_path, 0, 1, 0, "one\ntwo\r50%\rtwo: 100%\nhalf a l")
    _print(tmp_path, 1, 1, 1, "another rank\n")
    assert output.new_lines(1) == ["[rank 0] one", "[rank 0] two: 100%"]
    _print(tmp_path, 0, 1, 0, "ine\n")
    _print(tmp_path, 1, 2, 0, "elsewhere\n")
    assert output.new_lines(2) == ["[rank 0] half a line", "[rank 0] elsewhere"]
    assert output.new_lines(2) == []
    assert TrainerOutput(tmp_path, "none").new_lines(2) == []


def test_all_output_is_that_of_all_ranks(tmp_path: Path) -> None:
    output = TrainerOutput(tmp_path, "all")
    for rank in (0, 1):
        _print(tmp_path, rank, 1, rank, "hello\n")
    assert output.new_lines(1) == ["[rank 0] hello", "[rank 1] hello"]


def test_a_trainer_that_prints_without_end_does_not_bury_the_rest_and_its_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "_OUTPUT_SECONDS", 0.0)
    output = TrainerOutput(tmp_path, RANK_0)
    log = _print(tmp_path, 0, 1, 0, "x" * 99 + "\n")
    output.new_lines(1)
    _print(tmp_path, 0, 1, 0, ("x" * 99 + "\n") * 10_000)
    *lines, last = output.new_lines(1)
    assert len(lines) < 400
    assert str(log) in last
    log.write_text("[surefoot] older bytes were deleted\n")  # by its agent, as it had become too long
    assert output.new_lines(1) == []
    _print(tmp_path, 0, 1, 0, "on\n")
    assert output.new_lines(1) == ["[rank 0] on"]


def test_a_terminal_shows_bar_rows_and_nothing_that_it_would_obey() -> None:
    rows = (Row("node-0", "up", "worker-0-1", "", (LedgerEntry(2, 40, 0, 1.25, None, 0.0),)), Row("node-1", "down"))
    body = RunSnapshot("g\x1b[2J", RUNNING.status, 40, 160, 4.0, 1.25, rows=rows)
    stream = io.StringIO()
    Console(file=stream, width=150, force_terminal=False).print(draw(body))
    said = stream.getvalue()
    assert next(line for line in said.splitlines() if "━" in line).strip(" ━╸╺") == ""  # a line of its own
    assert "\x1b" not in said
    assert [line.split("│")[1:4] for line in said.splitlines() if "node-" in line] == [
        [" node-0 ", " up    ", " worker-0-1 "],
        [" node-1 ", " down  ", "            "],
    ]


@pytest.mark.parametrize("said", ["many", "0", "-1", "9" * 30, "1.5", "²"])
def test_a_total_that_is_no_number_of_steps_is_refused(said: str) -> None:
    with pytest.raises(UsageError, match="give the number of steps that the program makes"):
        _total_steps(Path("job.yaml"), {"metadata": {"annotations": {TOTAL_STEPS: said}}})


def test_the_examples_total_is_what_its_program_is_told() -> None:
    body = yaml.safe_load((Path(__file__).parents[4] / "examples" / "gpt.yaml").read_text(encoding="utf-8"))
    args = body["spec"]["template"]["spec"]["containers"][0]["args"]
    assert body["metadata"]["annotations"][TOTAL_STEPS] == args[args.index("--steps") + 1]
