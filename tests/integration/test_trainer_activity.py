"""What trainers are seen to do between two looks: real processes, read through /proc."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from surefoot.agent.trainers.supervisor import measure_activity
from surefoot.linux_process import cpu_seconds

SPINS = "while True:\n    pass\n"
COMPUTED_SECONDS = 0.3


@pytest.fixture
def spinning() -> Iterator[int]:
    """A process whose stack is the same whenever it is looked at, though it computes."""
    with subprocess.Popen([sys.executable, "-c", SPINS]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize(("waits", "counted"), [(False, True), (True, False)], ids=["computes", "waits for others"])
def test_what_a_rank_computes_counts_unless_it_waits_for_others(spinning: int, waits: bool, counted: bool) -> None:
    before, begun = measure_activity([(spinning, waits)]), cpu_seconds(spinning)
    while cpu_seconds(spinning) < begun + COMPUTED_SECONDS:
        pass
    seconds = measure_activity([(spinning, waits)]).cpu_seconds - before.cpu_seconds
    assert (seconds >= COMPUTED_SECONDS) is counted
