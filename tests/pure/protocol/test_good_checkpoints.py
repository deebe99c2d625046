"""Which checkpoint is proven to be good, and that retention never lets it go for newer suspects."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.builders import manifest
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.checkpoints.retention import SoundSteps, Standing, memory_drops, proven
from surefoot.protocol.identities import Checkpoint

C = {step: Checkpoint(1, step) for step in range(1, 200)}


def test_a_checkpoint_is_good_once_so_many_later_steps_were_well() -> None:
    held = (C[10], C[20], C[30])
    assert proven(held, frozenset(), SoundSteps(29, 0, 10)) == (C[10], {C[10], C[20]})
    assert proven(held, frozenset(), SoundSteps(30, 0, 10)) == (C[20], {C[20], C[30]})
    assert proven(held, frozenset({C[20]}), SoundSteps(35, 0, 10)) == (C[10], {C[10], C[30]})
    # odd at 25: what was saved before is not proven by steps behind it
    assert proven(held, frozenset(), SoundSteps(41, 25, 10), C[10]) == (C[30], {C[30]})
    assert proven(held, frozenset({C[30]}), SoundSteps(31, 31, 10), C[10]) == (C[10], {C[10]})


def test_what_a_good_one_grew_from_is_good_where_that_is_not_at_hand() -> None:
    # a part of it may lie on a holder that is silent
    assert proven((C[10], C[30]), frozenset(), SoundSteps(0, 0, 10), C[20]) == (C[20], {C[10], C[20], C[30]})


@given(
    interval=st.integers(1, 7),
    keep=st.integers(1, 3),
    later=st.integers(1, 12),
    odd=st.sets(st.integers(1, 120), max_size=8),
    asleep=st.sets(st.integers(1, 120), max_size=60),
)
def test_the_last_good_one_is_always_there_and_little_else_is_kept(
    interval: int, keep: int, later: int, odd: set[int], asleep: set[int]
) -> None:
    """A run of 120 steps with odd ones, whose holder is looked at now and then: what was ever proven stays, or newer."""
    held: set[Checkpoint] = set()
    known: Checkpoint | None = None
    lineage = (LineageEntry(1, None, 1),)
    for step in range(1, 121):
        if step % interval == 0:
            held.add(C[step])
        suspect = frozenset(c for c in held if c.step in odd)
        if step in asleep:
            continue
        sound = SoundSteps(step, max((s for s in odd if s <= step), default=0), later)
        known, spared = proven(held, suspect, sound, known)
        entries = [manifest(1, c.step, 0, 1) for c in held]
        newest = max(held, default=None)
        standing = Standing(lineage, 1, False, None, newest, None, None, frozenset(), good=spared)
        held -= {s.checkpoint for s in memory_drops(entries, standing, keep)}
        assert known is None or known in held
        assert known is None or not any(s in odd for s in range(known.step, known.step + later + 1) if s <= step)
        assert len(held) <= keep + 2
        if not odd and not asleep and step > interval + later:
            assert known is not None
            assert known.step > step - later - 2 * max(interval, later) - 1
