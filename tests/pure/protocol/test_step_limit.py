"""After how long without a step a world is suspect."""

from hypothesis import given
from hypothesis import strategies as st

from surefoot.protocol.hangs import FEWEST_STEPS, learned_limit_seconds

SECONDS = st.floats(0.001, 1e4)


def test_steps_of_a_second_are_suspect_long_before_the_ceiling() -> None:
    assert learned_limit_seconds([1.0] * 30, 600.0) == 120.0
    assert learned_limit_seconds([10.0] * 30, 600.0) == 200.0


def test_one_long_step_among_short_ones_is_no_surprise_the_second_time() -> None:
    assert learned_limit_seconds([1.0] * 30 + [90.0], 600.0) == 270.0


def test_of_few_steps_nothing_is_learned() -> None:
    assert learned_limit_seconds([1.0] * (FEWEST_STEPS - 1), 600.0) == 600.0


@given(st.lists(SECONDS, max_size=40), SECONDS)
def test_it_is_never_above_the_ceiling_nor_below_what_was_seen(steps: list[float], ceiling: float) -> None:
    limit = learned_limit_seconds(steps, ceiling)
    assert 0.2 * ceiling <= limit <= ceiling
    assert limit == ceiling or limit >= 3 * max(steps)
