"""The same seed does the same as when its trace was recorded (`tests/golden`): a moved rule must decide as before."""

from __future__ import annotations

import pytest

from golden.__main__ import HINT, RECORDED
from golden.traces import trace_line

LINES = (RECORDED / "traces.txt").read_text(encoding="utf-8").splitlines()[:20]


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"seed {int(line[:3])}")
def test_a_seed_does_what_was_recorded(line: str) -> None:
    assert trace_line(int(line[:3])) == line, HINT
