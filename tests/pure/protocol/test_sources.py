"""Where a restore came from, in one word: never a better one than the truth."""

import pytest

from surefoot.protocol.checkpoints.save_state import joined
from surefoot.restore.reader import ReadSummary


@pytest.mark.parametrize(
    ("sources", "word"),
    [
        ([], None),
        (["none", "none"], None),
        (["staging", "staging", "none"], "staging"),
        (["staging", "memory"], "staging+memory"),
        (["staging+memory", "staging"], "staging+memory"),
        (["staging+memory", "memory"], "staging+memory"),
        (["memory", "memory"], "memory"),
        (["persistent"], "persistent"),
        (["persistent", "staging"], "mixed"),
        (["staging+memory", "mixed"], "mixed"),
    ],
)
def test_sources_of_several_become_one_word(sources: list[str], word: str | None) -> None:
    assert joined(sources) == word


@pytest.mark.parametrize(
    ("by_kind", "word"),
    [
        ({"staging": 12_341_888, "memory": 128}, "staging"),  # FSDP: only the optimizer's counters are everybody's
        ({"staging": 300, "memory": 600}, "staging+memory"),  # DDP: a share of each rank's
        ({"staging": 12_341_888, "persistent": 128}, "mixed"),
        ({"memory": 900, "persistent": 1}, "mixed"),
        ({"memory": 900, "peer": 900}, "memory"),
        ({}, "none"),
    ],
)
def test_a_source_of_next_to_nothing_is_not_named_but_the_persistent_tier_is(
    by_kind: dict[str, int], word: str
) -> None:
    assert ReadSummary(1, by_kind, 0).source == word
