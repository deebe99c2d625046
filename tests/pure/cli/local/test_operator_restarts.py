"""An operator that dies often is started again, one that only dies is not."""

from __future__ import annotations

from surefoot_operator.cli.local.supervise import OPERATOR_RESTARTS, OperatorRestarts


def test_an_operator_that_ends_before_any_step_is_started_three_times() -> None:
    found = OperatorRestarts()
    for _ in range(OPERATOR_RESTARTS):
        found = found.ended(0)
        assert not found.exhausted
    assert found.ended(0).exhausted


def test_any_number_of_deaths_is_outlived_while_training_goes_on_between_them() -> None:
    found = OperatorRestarts()
    for death in range(1, 50):
        found = found.ended(death)
        assert not found.exhausted


def test_a_step_begins_the_count_anew_and_deaths_without_one_go_on_from_there() -> None:
    found = OperatorRestarts()
    for step in (0, 0, 0, 7):
        found = found.ended(step)
    assert found.count == 1
    for _ in range(OPERATOR_RESTARTS - 1):
        found = found.ended(7)
        assert not found.exhausted
    assert found.ended(7).exhausted
