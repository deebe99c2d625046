"""What keeps the benchmark's figures from saying more than they are worth."""

from __future__ import annotations

import io
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from bench.program import Program
from bench.quiet import QUIET_LOAD, refusal
from bench.significance import spread, spreads
from bench.step_lengths import row
from bench.systems.paced_store import PacedFile
from bench.worker import Turn


@pytest.mark.parametrize(("load", "asked", "measured"), [(0.2, False, True), (0.8, False, False), (28.0, True, True)])
def test_a_busy_machine_is_refused_unless_somebody_asks_for_it(load: float, asked: bool, measured: bool) -> None:
    why = refusal(load, asked)
    assert (why is None) == measured
    if why is not None:
        assert f"{load:.1f}" in why
        assert f"{QUIET_LOAD:g}" in why
        assert "--although-busy" in why


@pytest.mark.parametrize(
    ("theirs", "ahead"),
    [([2.0] * 5, True), ([2.0] * 4, False), ([2.0, 0.5] * 10, False), ([2.0] * 9 + [0.5], True), ([0.5] * 9, False)],
)
def test_a_ratio_is_ahead_only_where_chance_would_hardly_have_it_so(theirs: list[float], ahead: bool) -> None:
    found = spread(theirs, [1.0] * len(theirs))
    assert found is not None
    assert found["ahead"] == ahead
    assert (found["least"], found["most"], found["pairs"]) == (min(theirs), max(theirs), len(theirs))


def test_a_rate_is_ahead_of_the_best_peer_only_if_it_is_ahead_of_each() -> None:
    def turn(seconds: float, **more: Any) -> dict[str, Any]:
        return {"idle": {"seconds": [seconds] * 6}, "incomplete": [], **more}

    turns = {
        "surefoot": [turn(1.0)],
        "torch.save": [turn(1.5)],
        "dcp.save": [turn(0.9)],
        "torchsnapshot": [{"error": "no"}],
    }
    found = spreads(
        turns, {"restores": {"surefoot": {"seconds": [9.0, *[1.0] * 5]}, "dcp.load": {"seconds": [0.1, *[2.0] * 5]}}}
    )
    assert found["r2_over_best_local_peer"]["ahead"] is False
    assert found["r2_over_best_local_peer"]["least"] == pytest.approx(0.9)
    assert found["restore_over_dcp_load"] == {"least": 2.0, "most": 2.0, "pairs": 5, "ahead": True}
    del turns["dcp.save"]
    assert spreads(turns, {})["r2_over_best_local_peer"]["ahead"] is True
    assert spreads({"surefoot": [{"error": "no"}]}, {"restores": {"error": "no"}}) == {
        "restore_over_dcp_load": None,
        "r2_over_best_local_peer": None,
    }


def test_a_step_length_says_which_saves_became_safe() -> None:
    plain = {"interval": 0, "seconds": [1.0] * 3, "stalls": [], "left_seconds": 0.0}
    dense = {"interval": 1, "seconds": [9.0, 1.5, 1.5], "stalls": [0.1] * 3, "left_seconds": 0.5}
    turn = {"spare": {"stretches": [dense, plain, dense, plain]}, "incomplete": ["step 2", "step 5", "step 6"]}
    found = row(0.5, {"surefoot": turn, "torch.save": {"error": "too slow"}})
    assert found["step_over_drain"] == 0.5
    assert found["surefoot"] == {"step_seconds": 1.0, "relative_step": pytest.approx(1.5), "saves_safe": 0.5}
    assert found["torch.save"] == {"error": "too slow"}


def test_a_paced_file_takes_at_least_the_time_of_its_pace_and_has_every_byte() -> None:
    behind = io.BytesIO()
    file = PacedFile(behind, 1e6)
    began = time.monotonic()
    for _ in range(4):
        assert file.write(b"x" * 10_000) == 10_000
    file.finish()
    assert time.monotonic() - began >= 0.04
    assert behind.getvalue() == b"x" * 40_000


def test_torch_save_writes_to_a_paced_file() -> None:
    """It asks more of a file than to be written to: without all of that the paced store dropped out of the bench."""
    behind = io.BytesIO()
    file = PacedFile(behind, 1e9)
    torch.save({"w": torch.arange(8)}, file)  # type: ignore[arg-type]  # it writes and flushes, and no more is asked
    file.finish()
    behind.seek(0)
    assert torch.equal(torch.load(behind)["w"], torch.arange(8))


class Digests:
    """A system that keeps a digest of what it was to save."""

    def __init__(self, program: Program) -> None:
        self._program, self.seen = program, list[tuple[float, ...]]()

    def begin(self, step: int) -> None:
        self.seen.append(tuple(float(t.double().sum()) for t in self._program.tensors()))

    def before_step(self) -> None: ...

    def finish(self) -> None: ...


def test_a_save_with_nothing_else_running_is_of_a_state_that_has_changed() -> None:
    """Saves of one and the same state measured how fast a holder copies within itself what it has."""
    turn = object.__new__(Turn)
    turn.program, turn.step = Program(16, 1), 0
    system = Digests(turn.program)
    turn.system, turn.cores = system, cast(Any, SimpleNamespace(enter=lambda mode: None, companions=()))  # type: ignore[assignment]  # what is called of both
    found = turn.idle(3)
    assert len(found["seconds"]) == len(system.seen) == 3
    changed = [sum(a != b for a, b in zip(one, other, strict=True)) for one, other in pairwise(system.seen)]
    assert min(changed) > 0.9 * len(system.seen[0])
