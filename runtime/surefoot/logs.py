"""Formats log records of all processes, as text or JSON.

Text that others wrote must not drive the terminal of whoever reads it, and a line without keys cannot be found by the
job or node it is about: every record carries `KEYS`, and each control character is written out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from surefoot.errors import ConfigurationError
from surefoot.protocol.text import escape_control_characters

VARIABLE = "SUREFOOT_LOG_FORMAT"
FORMATS = ("text", "json")
KEYS = ("namespace", "job", "worker", "rank", "generation", "node", "memory_server")
"""What a record is about: of the whole process, or of one call by `extra=`."""


class PlainFormatter(logging.Formatter):
    """A log line, tracebacks and all, with each control character written out."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control_characters(super().format(record))


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object a line.

    Time (UTC), level, logger, message, the keys that are known, exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": escape_control_characters(record.getMessage()),
        }
        body |= {key: value for key in KEYS if (value := getattr(record, key, None)) not in (None, "")}
        if record.exc_info:
            body["exception"] = escape_control_characters(self.formatException(record.exc_info))
        return json.dumps(body, ensure_ascii=False, default=str)


class ProcessKeys(logging.Filter):
    """Adds the keys of its process to each record.

    Those that a call gave itself stay.
    """

    def __init__(self, keys: Mapping[str, object]) -> None:
        super().__init__()
        self._keys = dict(keys)

    def filter(self, record: logging.LogRecord) -> bool:
        for key, value in self._keys.items():
            if not hasattr(record, key):
                setattr(record, key, value)
        return True


def formatter_of(format_name: str, text: logging.Formatter) -> logging.Formatter:
    """The formatter that SUREFOOT_LOG_FORMAT names.

    Args:
        form: the variable's value: `text`, `json`, or empty for text.
        text: the formatter of text.

    Raises:
        ConfigurationError: it names another.
    """
    if format_name not in ("", *FORMATS):
        raise ConfigurationError(f"{VARIABLE} is {format_name!r}: one of {', '.join(FORMATS)} is needed")
    return JsonFormatter() if format_name == "json" else text


def configure_logging(
    environment: Mapping[str, str], text: str, dates: str | None = None, keys: Mapping[str, object] | None = None
) -> None:
    """Sends this process' log to stderr.

    Args:
        environment: SUREFOOT_LOG_LEVEL and SUREFOOT_LOG_FORMAT are read from it.
        text: `logging`'s format of a line of text; `dates` that of its time.
        keys: the `KEYS` of this process, for every record.

    Raises:
        ConfigurationError: SUREFOOT_LOG_FORMAT names no format.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(formatter_of(environment.get(VARIABLE, ""), PlainFormatter(text, dates)))
    handler.addFilter(ProcessKeys(keys or {}))
    logging.basicConfig(level=environment.get("SUREFOOT_LOG_LEVEL", "INFO"), handlers=[handler])
