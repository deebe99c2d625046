"""Every layout on real gloo ranks, bit for bit what the framework itself gathers: saved by four and restored by two into
every layout, saved by two and restored by four into its own and one other. Pairs of more world sizes are
tests/pure/test_layout_pairs.py's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.layout_kinds import ALONE, KINDS
from support.layout_world import EXAMPLE

SCRIPT = Path(__file__).parents[1] / "support" / "layout_world.py"
LIMIT_SECONDS = 240


def world(size: int, restore: Path | None, save: Path | None, group: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUREFOOT_")}
    environment |= {
        "WORLD_SIZE": str(size),
        "GROUP": f"file://{group}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SCRIPT.parents[1]),
    }
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(restore or "-"), str(save or "-"), *KINDS]
    ranks = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(size)
    ]
    try:
        for process in ranks:
            output, _ = process.communicate(timeout=LIMIT_SECONDS)
            assert process.returncode == 0, output.decode()[-3000:]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What was wrong with each pair: {"4 to 2": {"from to": problem}}."""
    folder = tmp_path_factory.mktemp("layouts")
    by_four, by_two = folder / "four", folder / "two"
    by_four.mkdir()
    by_two.mkdir()
    world(4, None, by_four, folder / "group-a")
    world(2, by_four, by_two, folder / "group-b")
    world(4, by_two, None, folder / "group-c")
    found = {"4 to 2": by_four, "2 to 4": by_two}
    return {name: json.loads((where / "restored.json").read_text()) for name, where in found.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", ["4 to 2", "2 to 4"])
def test_a_layout_returns_into_every_layout(kind: str, sizes: str, restored: dict[str, dict[str, str]]) -> None:
    pairs = {pair: problem for pair, problem in restored[sizes].items() if pair.startswith(f"{kind} ")}
    others = 0 if kind in ALONE else len(KINDS) - len(ALONE) - 1 if sizes == "4 to 2" else int(kind != EXAMPLE)
    assert len(pairs) == 1 + others
    wrong = {pair: problem for pair, problem in pairs.items() if problem}
    assert not wrong, "\n".join(f"{pair}: {problem}" for pair, problem in wrong.items())
