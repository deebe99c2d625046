"""How long a start without an agent waits, for what, and what it takes another program for."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from support.builders import manifest
from surefoot.checkpointer.library_mode.epoch_records import (
    MAX_SECONDS,
    MIN_SECONDS,
    MISSING_SECONDS,
    FolderReading,
    Patience,
    doubt_of,
    passed_over,
    step_seconds_of,
    worth_seconds,
)
from surefoot.checkpointer.library_mode.other_writers import WriterMark, judge
from surefoot.protocol.identities import Checkpoint

TWENTY, FORTY, SIXTY = Checkpoint(1, 20), Checkpoint(1, 40), Checkpoint(2, 60)
NONE: frozenset[Checkpoint] = frozenset()
READING = FolderReading("/folder/job", (), {}, (TWENTY, FORTY), frozenset([TWENTY, FORTY]), {}, {}, {}, FORTY)


@pytest.mark.parametrize(
    ("steps", "step_seconds", "wanted"),
    [
        (100, 0.5, 50.0),
        (10, 0.02, MIN_SECONDS),
        (1000, 60.0, MAX_SECONDS),
        (30, None, 30.0),
        (30, math.nan, 30.0),
        (30, -4.0, 30.0),
        (30, math.inf, 30.0),
        (10**400, 1e300, MAX_SECONDS),
    ],
)
def test_a_wait_costs_what_the_steps_cost_within_bounds(steps: int, step_seconds: float | None, wanted: float) -> None:
    assert worth_seconds(steps, step_seconds) == wanted


def test_a_step_takes_what_lay_between_the_last_two_saves_of_an_epoch() -> None:
    saves = [
        replace(manifest(epoch, step, 0, 1), saved_at=at)
        for epoch, step, at in ((1, 10, 5.0), (1, 20, 25.0), (2, 30, 9e9))
    ]
    assert step_seconds_of(saves) == 2.0
    assert step_seconds_of(saves[1:]) is None


def test_a_wait_is_logged_when_it_has_doubled_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    patience = Patience(clock=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    with caplog.at_level(logging.WARNING):
        while patience.wait("the folder is silent", 300.0):
            pass
    assert now[0] == pytest.approx(300.0)
    waited = [float(record.args[2]) for record in caplog.records if isinstance(record.args, tuple)]
    assert waited[0] == 0.0
    assert all(later >= 2 * earlier for earlier, later in pairwise(waited))
    assert waited[-1] > 50.0, "and to the end"
    assert caplog.records[0].getMessage().startswith("the folder is silent: retried for up to 300 s")


def test_what_is_silent_and_newer_is_worth_its_steps() -> None:
    reading = replace(READING, silent={SIXTY: "SlowDown"}, step_seconds=3.0)
    doubt = doubt_of(reading, NONE)
    assert doubt is not None
    assert (doubt.seconds, doubt.reason) == (60.0, "step 60 of generation 2 cannot be read: SlowDown")
    assert doubt_of(replace(reading, silent={TWENTY: "SlowDown"}), NONE) is None, "it would not be restored anyway"


@pytest.mark.parametrize(
    ("named", "doubtful"), [(SIXTY, True), (FORTY, False), (None, False), (Checkpoint(0, 60), False), (TWENTY, False)]
)
def test_what_is_named_and_not_there_is_missed_unless_a_newer_start_went_on(
    named: Checkpoint | None, doubtful: bool
) -> None:
    doubt = doubt_of(replace(READING, named=named), NONE)
    assert (doubt is not None) == doubtful
    if doubt is not None:
        assert doubt.seconds == MISSING_SECONDS


def test_a_damaged_record_matters_only_where_nothing_can_be_restored() -> None:
    reading = replace(READING, named=None, named_problem="it is damaged")
    assert doubt_of(reading, NONE) is None
    assert doubt_of(replace(reading, complete=()), NONE) is not None


def test_what_a_start_passes_over_is_what_is_newer_than_its_parent() -> None:
    reading = replace(READING, seen=frozenset([TWENTY, FORTY, Checkpoint(1, 50)]), named=SIXTY)
    assert set(passed_over(reading, FORTY, NONE)) == {Checkpoint(1, 50), SIXTY}
    assert set(passed_over(reading, None, NONE)) == {TWENTY, FORTY, Checkpoint(1, 50), SIXTY}


OWN = WriterMark("here", "boot-1 pid:[1]", "10:500", "train.py", 1000.0)


@pytest.mark.parametrize(
    ("mark", "alive", "wanted"),
    [
        (OWN, True, "own"),
        (replace(OWN, process="11:600"), True, "writes"),
        (replace(OWN, process="11:600"), False, "ended"),
        (replace(OWN, kernel="boot-2 pid:[1]", at=990.0), False, "unknown"),
        (replace(OWN, kernel="boot-2 pid:[1]", at=900.0), True, "ended"),
        (replace(OWN, kernel="boot-2 pid:[1]", at=9000.0), True, "unknown"),
        (replace(OWN, kernel="boot-2 pid:[1]", at=math.nan), True, "unknown"),
        (replace(OWN, kernel="", process="11:0"), True, "unknown"),
        (None, True, "unknown"),
    ],
)
def test_a_mark_tells_whether_its_program_writes(mark: WriterMark | None, alive: bool, wanted: str) -> None:
    assert judge(mark, OWN, 1000.0, lambda process: alive) == wanted


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"at": 1}', "<html>", '{"host": "a", "kernel": "b", "process": "x", "program": "", "at": 1}'],
)
def test_what_is_no_mark_is_none(text: str) -> None:
    assert WriterMark.parse(text) is None


def test_a_mark_survives_its_text() -> None:
    assert WriterMark.parse(OWN.to_text()) == OWN
    assert WriterMark.here().to_text() != ""
