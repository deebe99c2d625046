"""Formats log records of all processes, as text or JSON.

Text from outside must not control the reader's terminal, so each control character is escaped. Every record carries
`KEYS`, by which log lines of a job or node can be found.
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
"""Names of the objects that a record is about, set for the whole process or by `extra=` of one call."""


class PlainFormatter(logging.Formatter):
    """Formats a record as text, including tracebacks, and escapes each control character."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control_characters(super().format(record))


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time (UTC), level, logger, message, the keys with a value, exception."""

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
    """Adds the keys of the process to each record; keys that the call set itself stay."""

    def __init__(self, keys: Mapping[str, object]) -> None:
        super().__init__()
        self._keys = dict(keys)

    def filter(self, record: logging.LogRecord) -> bool:
        for key, value in self._keys.items():
            if not hasattr(record, key):
                setattr(record, key, value)
        return True


def formatter_of(format_name: str, text: logging.Formatter) -> logging.Formatter:
    """Returns the formatter that SUREFOOT_LOG_FORMAT names.

    Args:
        format_name: The variable's value: `text`, `json`, or empty for text.
        text: The formatter to use for text.

    Raises:
        ConfigurationError: The value names no format.
    """
    if format_name not in ("", *FORMATS):
        raise ConfigurationError(f"{VARIABLE} is {format_name!r}: set it to one of {', '.join(FORMATS)}")
    return JsonFormatter() if format_name == "json" else text


def configure_logging(
    environment: Mapping[str, str], text: str, dates: str | None = None, keys: Mapping[str, object] | None = None
) -> None:
    """Sends this process's log to stderr.

    Args:
        environment: Provides SUREFOOT_LOG_LEVEL and SUREFOOT_LOG_FORMAT.
        text: Format of a text line, as for `logging`.
        dates: Format of the time in a text line; None: that of `logging`.
        keys: Values of the `KEYS` for every record of this process.

    Raises:
        ConfigurationError: SUREFOOT_LOG_FORMAT names no format.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(formatter_of(environment.get(VARIABLE, ""), PlainFormatter(text, dates)))
    handler.addFilter(ProcessKeys(keys or {}))
    logging.basicConfig(level=environment.get("SUREFOOT_LOG_LEVEL", "INFO"), handlers=[handler])
