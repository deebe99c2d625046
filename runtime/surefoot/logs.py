"""How agents, holders and the operator write their logs: one line an event, nothing in it that a terminal would obey."""

from __future__ import annotations

import logging

from surefoot.protocol.plain import plain


class PlainFormatter(logging.Formatter):
    """A log line, tracebacks and all, with each control character written out."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def begin_logs(level: str, form: str, dates: str | None = None) -> None:
    """To stderr, through `PlainFormatter`."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(form, dates))
    logging.basicConfig(level=level, handlers=[handler])
