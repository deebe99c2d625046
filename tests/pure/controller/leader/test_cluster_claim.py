"""Which installation of the operator looks after which jobs: never two after one, and never nobody for long."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.controller.leader.cluster_claim import (
    EXPIRY_SECONDS,
    MAX_INSTALLATIONS,
    MAX_READ_GAP_SECONDS,
    RENEW_SECONDS,
    Claim,
    InvalidClaims,
    ObservedClaims,
    add_reading,
    claims_text,
    find_rival,
    needs_renewal,
    parse_claims,
    renew_claim,
)

NAMESPACES = st.sampled_from(["", "a", "b", "c"])


def watched(claims: dict[str, Claim], seconds: float) -> ObservedClaims:
    """Read again and again for so long, always the same."""
    seen = ObservedClaims()
    for second in range(round(seconds) + 1):
        seen = add_reading(seen, claims, float(second))
    return seen


@given(st.dictionaries(st.text(max_size=8), st.builds(Claim, NAMESPACES, st.text(max_size=8)), max_size=5))
def test_claims_are_read_as_they_were_written(claims: dict[str, Claim]) -> None:
    assert parse_claims(claims_text(claims)) == claims


@pytest.mark.parametrize(
    "text",
    ["[]", "{", "3", '{"a": 3}', '{"a": {}}', '{"a": {"namespace": 1, "beat": "x"}}', "[" * 70_000, "\x00",
     json.dumps({str(n): {"namespace": "", "beat": ""} for n in range(MAX_INSTALLATIONS + 1)})],
)  # fmt: skip
def test_what_something_else_wrote_is_no_claim(text: str) -> None:
    with pytest.raises(InvalidClaims):
        parse_claims(text)


def test_nothing_is_written_that_nobody_could_read() -> None:
    fine = {str(number): Claim("", "1") for number in range(MAX_INSTALLATIONS)}
    assert len(parse_claims(claims_text(fine))) == MAX_INSTALLATIONS
    for wrong in ({**fine, "more": Claim("", "1")}, {"long": Claim("", "x" * 70_000)}):
        with pytest.raises(InvalidClaims):
            claims_text(wrong)


@given(st.lists(st.tuples(st.sampled_from("xyz"), NAMESPACES), max_size=8))
def test_two_that_may_have_a_job_in_common_never_stand_together(comers: list[tuple[str, str]]) -> None:
    """Whoever comes, in any order: it writes what `renew` says where it finds no rival."""
    claims: dict[str, Claim] = {}
    for name, namespace in comers:
        seen = add_reading(ObservedClaims(), claims, 0.0)
        if not find_rival(seen, name, namespace, 0.0):
            claims = renew_claim(seen, name, Claim(namespace, "beat"), 0.0)
        spaces = [claim.namespace for claim in claims.values()]
        assert len(spaces) == len(set(spaces))
        assert "" not in spaces or len(spaces) == 1 or name in claims


@pytest.mark.parametrize(
    ("first", "second", "rival"),
    [("", "", True), ("", "a", True), ("a", "", True), ("a", "a", True), ("a", "b", False)],
)
def test_operators_of_different_namespaces_are_no_rivals(first: str, second: str, rival: bool) -> None:
    seen = add_reading(ObservedClaims(), {"one": Claim(first, "1")}, 0.0)
    assert find_rival(seen, "two", second, 0.0) == ("one" if rival else "")
    assert find_rival(seen, "one", first, 0.0) == "", "a replica of the same installation comes at once"


def test_who_is_gone_is_succeeded_after_a_while_and_not_before() -> None:
    claims = {"gone": Claim("", "1")}
    for seconds, rival in ((EXPIRY_SECONDS - 1, "gone"), (EXPIRY_SECONDS, "")):
        assert find_rival(watched(claims, seconds), "new", "", seconds) == rival
    assert set(renew_claim(watched(claims, EXPIRY_SECONDS), "new", Claim("", "1"), EXPIRY_SECONDS)) == {"new"}


def test_who_could_not_look_does_not_say_that_others_did_not_renew() -> None:
    """An API server that was away for a minute: the installation that waits does not take over when it is back."""
    claims = {"one": Claim("", "1")}
    seen = add_reading(watched(claims, 3), claims, 63.0)
    assert find_rival(seen, "two", "", 63.0) == "one"
    assert find_rival(add_reading(seen, claims, 65.0), "two", "", 65.0) == "one"


def test_one_of_several_replicas_renews() -> None:
    seen = watched({"one": Claim("", "1")}, RENEW_SECONDS - 1)
    assert not needs_renewal(seen, "one", "", RENEW_SECONDS - 1), "another replica has just done so"
    assert needs_renewal(watched({"one": Claim("", "1")}, RENEW_SECONDS), "one", "", RENEW_SECONDS)
    assert needs_renewal(seen, "one", "a", 0.0), "its namespace is another now"
    assert needs_renewal(seen, "two", "a", 0.0)


def test_who_stops_acting_does_so_before_another_may_begin() -> None:
    """With two renewals missed and each of them late by a whole call."""
    assert RENEW_SECONDS + MAX_READ_GAP_SECONDS <= EXPIRY_SECONDS
