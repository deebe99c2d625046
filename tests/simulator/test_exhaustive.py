"""Every schedule of small scopes: none violates the protocol, and with a rule off some does."""

import pytest

from simulator.exhaustive import Search
from simulator.scopes import SCOPES, Found, Scope

BROKEN = (
    Scope("no fence in drop", 1, 2, 2, 2, off=frozenset({"fence in drop"})),
    Scope("no fence in commit", 1, 3, 1, 1, off=frozenset({"fence in commit"})),
    Scope("one copy makes a watermark", 1, 2, 2, 1, off=frozenset({"W from R_eff"})),
    Scope("the parent is not kept", 1, 2, 2, 0, off=frozenset({"keep parent"})),
    Scope("listed before reading", 1, 2, 1, 1, persistent=True, off=frozenset({"list after read"})),
)


@pytest.mark.parametrize("scope", SCOPES[:5], ids=lambda s: s.name)
def test_no_schedule_of_a_small_scope_violates_the_protocol(scope: Scope) -> None:
    assert Search(scope).run() > 1000


@pytest.mark.parametrize("scope", BROKEN, ids=lambda s: s.name)
def test_a_rule_that_is_off_is_found(scope: Scope) -> None:
    with pytest.raises(Found):
        Search(scope).run()
