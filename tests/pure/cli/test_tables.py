"""Tables and amounts as people and scripts read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from surefoot_operator.cli.tables import age, number, print_lines, table_lines

COLUMNS: dict[str, Callable[[tuple[str, str]], str]] = {"NAME": lambda row: row[0], "STATE": lambda row: row[1]}


def test_columns_are_aligned_and_nothing_trails() -> None:
    found = table_lines({"a": "Running", "longer": "-"}.items(), COLUMNS)
    assert found == ["NAME     STATE", "a        Running", "longer   -"]


def test_a_table_without_rows_is_its_heading() -> None:
    assert table_lines([], COLUMNS) == ["NAME   STATE"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "-"),
        (0, "0s"),
        (-3, "0s"),
        (119.9, "119s"),
        (276, "4m36s"),
        (3599, "59m"),
        (7800, "2h10m"),
        (3 * 86400 + 4 * 3600, "3d4h"),
    ],
)
def test_ages_have_two_units_at_most(seconds: float | None, said: str) -> None:
    assert age(seconds) == said


@pytest.mark.parametrize(("value", "said"), [(None, "-"), (0, "0"), (12345, "12345"), (0.12345, "0.123")])
def test_what_is_not_known_is_no_zero(value: float | None, said: str) -> None:
    assert number(value) == said


def test_what_programs_said_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(["worker 1: \x1b[2Jgone"])
    assert capsys.readouterr().out == "worker 1: \\x1b[2Jgone\n"
