"""The commands of docs/install.md that lead from an empty machine to a recovered job, as tests read and run them. Pure but for reading."""

from __future__ import annotations

import re
import shlex

from chart.helm import PROJECT

SECTION = "## From an empty machine to a recovered job"


def lines() -> list[str]:
    """Each line of the section's block, without comments."""
    text = (PROJECT / "docs" / "install.md").read_text(encoding="utf-8").partition(SECTION)[2]
    [block] = re.findall(r"```sh\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)
    return str(block).splitlines()


def commands() -> list[list[str]]:
    """The same as words."""
    return [shlex.split(line, comments=True) for line in lines()]
