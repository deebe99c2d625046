"""What a program says is shown; what a terminal would obey is written out."""

from __future__ import annotations

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.logs import PlainFormatter
from surefoot.protocol.messages import TrainerFailure
from surefoot.protocol.text import escape_control_characters
from surefoot.protocol.wire import decode, encode


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("bell\a", "bell\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("over\rwritten", "over\\x0dwritten"),
        ("user\u202etxt.exe", "user\\u202etxt.exe"),
        ("half \ud800", "half \\ud800"),
        ("a\tb\nc é 🦶", "a\tb\nc é 🦶"),
    ],
)
def test_what_a_terminal_obeys_is_written_out(text: str, shown: str) -> None:
    assert escape_control_characters(text) == shown


@given(st.text())
def test_it_can_be_printed_and_is_the_same_when_done_twice(text: str) -> None:
    once = escape_control_characters(text)
    once.encode()
    assert escape_control_characters(once) == once
    assert all(c in "\t\n" or c >= " " for c in once)


def test_an_exceptions_words_reach_events_and_status_plain() -> None:
    heard = decode(encode(TrainerFailure(1, 0, 1, "RuntimeError: \x1b[2J\u202eboom", False, 3)))
    assert isinstance(heard, TrainerFailure)
    assert heard.cause == "RuntimeError: \\x1b[2J\\u202eboom"


def test_a_log_line_is_plain_its_traceback_too() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter("%(message)s"))
    try:
        raise ValueError("\x1b]0;title\a")
    except ValueError as error:
        record = logging.LogRecord(
            "a", logging.ERROR, "", 0, "said %s", (str(error),), (ValueError, error, error.__traceback__)
        )
    handler.emit(record)
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().count("\\x1b]0;title\\x07") == 2
