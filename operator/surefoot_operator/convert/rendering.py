"""Writes a conversion as YAML with comments."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

import yaml

from surefoot.protocol.plain import plain
from surefoot_operator.convert.job_draft import Conversion
from surefoot_operator.convert.manifest import Note

WIDTH = 120
_QUOTED = re.compile(r"[-+]?\.?\d|[yYnN]$")
"""Texts that Kubernetes' reader of YAML takes for numbers or truth values where PyYAML's does not: `1e-4`."""


def rendered(conversion: Conversion) -> str:
    """Renders the job, with what became of each field above it."""
    lines = [f"# Converted from {conversion.source}."]
    for title, entries in (
        ("To do before it is applied:", list(conversion.to_do)),
        ("Left out:", list(_left(conversion.left))),
        ("Taken over:", [f"{note.path} -> {note.text}" for note in conversion.taken]),
    ):
        if entries:
            lines += ["#", f"# {title}"]
            for entry in entries:
                lines += textwrap.wrap(
                    plain(entry), WIDTH, initial_indent="#   * ", subsequent_indent="#     ", break_on_hyphens=False
                )
    body = yaml.dump(conversion.job, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)
    return "\n".join(lines) + "\n" + body


class _Dumper(yaml.SafeDumper):
    """Writes scripts as people do, line by line, and never an alias, which no reader of ours takes."""

    def ignore_aliases(self, _: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else "'" if _QUOTED.match(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _left(notes: Sequence[Note]) -> Iterator[str]:
    """One line for each reason, its fields in the order in which they stand."""
    by_reason: dict[str, list[str]] = {}
    for note in notes:
        by_reason.setdefault(note.text, []).append(note.path)
    for reason, paths in by_reason.items():
        yield f"{', '.join(paths)}: {reason}"
