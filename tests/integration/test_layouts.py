"""Every layout on real gloo ranks, bit for bit what the framework itself gathers: saved by four and restored by two into
every layout, saved by two and restored by four into its own and one other. Pairs of more world sizes are
tests/pure/restore/test_layout_pairs.py's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.gloo_world import ended, started
from support.layout_kinds import ALONE, KINDS
from support.programs.layout_world import EXAMPLE


def world(size: int, restore: Path | None, save: Path | None, group: Path) -> None:
    ended(started("layout_world.py", [str(restore or "-"), str(save or "-"), *KINDS], size, group))


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
