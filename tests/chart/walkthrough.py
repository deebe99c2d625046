"""The commands of docs/first-hour.md, as tests read and run them. Pure but for reading."""

from __future__ import annotations

import re
import shlex

from chart.helm import PROJECT

PAGE = PROJECT / "docs" / "first-hour.md"


def lines() -> list[str]:
    """Each line of the page's blocks, in their order."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def commands() -> list[list[str]]:
    """The same as words."""
    return [shlex.split(line, comments=True) for line in lines()]
