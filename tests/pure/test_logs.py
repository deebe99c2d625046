"""A log record says in keys what it is about, as JSON where SUREFOOT_LOG_FORMAT says so."""

from __future__ import annotations

import json
import logging

import pytest

from surefoot.errors import ConfigurationError
from surefoot.logs import JsonFormatter, PlainFormatter, ProcessKeys, formatter_of


def record(message: str, **keys: object) -> logging.LogRecord:
    made = logging.LogRecord("surefoot.x", logging.WARNING, "x.py", 1, message, ("a",), None)
    for key, value in keys.items():
        setattr(made, key, value)
    return made


def test_json_line_has_the_process_keys_and_those_of_the_call() -> None:
    made = record("rank %s exited", rank=3, generation=0, job="another")
    assert ProcessKeys({"job": "train", "worker": 2, "node": ""}).filter(made)
    line = JsonFormatter().format(made)
    body = json.loads(line)
    assert "\n" not in line
    assert body["message"] == "rank a exited"
    assert (body["level"], body["logger"], body["time"][-6:]) == ("WARNING", "surefoot.x", "+00:00")
    assert {k: body[k] for k in ("job", "worker", "rank", "generation")} == {
        "job": "another",
        "worker": 2,
        "rank": 3,
        "generation": 0,
    }
    assert "node" not in body


def test_json_line_drives_no_terminal_and_keeps_the_traceback() -> None:
    try:
        raise ValueError("\x1b[2J")
    except ValueError as error:
        made = record("%s \x1b[2J")
        made.exc_info = (ValueError, error, error.__traceback__)
    line = JsonFormatter().format(made)
    assert "\x1b" not in line
    assert "\\u001b" not in line
    assert "ValueError: \\x1b[2J" in json.loads(line)["exception"]


def test_format_is_text_unless_json_is_asked_for_and_another_is_refused() -> None:
    text = PlainFormatter("%(message)s")
    assert formatter_of("", text) is formatter_of("text", text) is text
    assert isinstance(formatter_of("json", text), JsonFormatter)
    with pytest.raises(ConfigurationError, match=r"SUREFOOT_LOG_FORMAT is 'xml': set it to one of text, json"):
        formatter_of("xml", text)
