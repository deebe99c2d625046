"""A part of the benchmark that fails says why, and takes nothing else with it."""

from __future__ import annotations

import signal

import pytest
from bench.jobs import attempt, said
from bench.settings import FULL, QUICK, Size
from bench.summary import ASYNCHRONOUS, OURS


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (None, "still going\n", "ended after 90 s: still going"),
        (-signal.SIGKILL, "", "killed, as the kernel does when memory runs out: "),
        (-signal.SIGABRT, "an assertion\n", "exit code -6: an assertion"),
        (1, "one\n\ntwo\nthree\nfour\n", "exit code 1: two | three | four"),
        (0, "", "exit code 0: "),
    ],
)
def test_why_a_part_has_no_result(code: int | None, log: str, expected: str) -> None:
    assert said(code, 90.0, log) == expected


def test_what_stands_around_a_part_may_fail_too() -> None:
    def part() -> dict[str, object]:
        raise RuntimeError("no holder started")

    assert attempt(part) == {"error": "RuntimeError('no holder started')"}
    assert attempt(lambda: {"seconds": 1.0}) == {"seconds": 1.0}


@pytest.mark.parametrize("size", [QUICK, FULL])
def test_ours_and_asynchronous_peers_are_asked_for_the_same_intervals(size: Size) -> None:
    for saving in (size.saving, size.saving_without):
        for name in (OURS, *saving.among):
            assert saving.of(name).count(10) >= 2, f"one comparison has no spread: {name}"
    assert set(FULL.saving_without.among) == set(ASYNCHRONOUS)
    assert {"dcp.async_save", "dcp.async_save stager"} <= set(QUICK.saving_without.among)
    assert size.saving.of("sagemaker") == ()
