"""The page about other people's libraries says what its cases found: all of them, in the generator's form, none wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compatibility.case import world_of
from compatibility.catalogue import APART, CASES
from compatibility.judging import Life, judged, unlike
from compatibility.rows import AREAS, RESULTS, Row, as_json, as_page, of_page

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
ABOUT = ("optimizer", "Any", "same")
STEPS = 5


def life(first: int = 1, restored: int | None = None, shift: float = 0.0, **more: object) -> Life:
    losses = {step: float(step) + shift for step in range(first, STEPS + 1)}
    return Life(restored=restored, losses=losses, **more)  # type: ignore[arg-type]


def test_the_page_is_what_the_generator_writes_of_its_rows() -> None:
    text = PAGE.read_text()
    assert as_page(of_page(text)) == text


def test_the_page_has_every_case_and_none_is_wrong() -> None:
    rows = of_page(PAGE.read_text())
    assert {(r.area, r.name, r.world) for r in rows} == {(c.area, c.name, c.world) for c in (*CASES, *APART)}
    assert len(rows) == len(CASES) + len(APART)
    assert {r.area for r in rows} == set(AREAS)
    assert [r for r in rows if r.result not in RESULTS or r.result == "wrong" or not r.why] == []


def test_rows_survive_both_forms() -> None:
    rows = [
        Row("loader", "a | b, c", "resized", "rejected", "give\nanother"),
        Row("optimizer", "SGD", "same", "exact", "equal to the last bit"),
        Row("wrapper", "DDP", "same", "exact", "equal to 1e-12; 2→2 ranks"),
        Row("wrapper", "DDP", "3→2→3", "exact", "equal to 1e-12; 3→2→3 ranks"),
    ]
    assert sorted(of_page(as_page(rows))) == sorted([replace(rows[0], why="give another"), *rows[1:]])
    assert as_json(rows).index("SGD") < as_json(rows).index("a | b")


def test_a_reason_that_differs_only_in_numbers_is_on_the_page_once() -> None:
    reason = "loader (A) is each rank's own state, and the checkpoint is of 3 ranks and this world has 2"
    rows = [
        Row("loader", "a", "resized", "rejected", reason),
        Row("loader", "b", "resized", "rejected", f"ConfigurationError: {reason.replace('2', '1')}"),
        Row("loader", "c", "same", "rejected", "another reason"),
    ]
    page = as_page(rows)
    assert "* `resized rejected 1`: a; b\n* `same rejected 2`: c\n" in page
    assert page.endswith(
        "1. loader is each rank's own state, and the checkpoint is of N ranks and this world has M\n2. another reason\n"
    )


def test_an_equal_continuation_is_exact() -> None:
    row = judged(ABOUT, [life()], [Life(losses={1: 1.0, 2: 2.0})], [life(3, restored=2)], STEPS)
    assert (row.result, row.why) == ("exact", "equal to the last bit")


@pytest.mark.parametrize(
    ("resumed", "why"),
    [
        (life(3, restored=2, shift=1e-15), "step 3 has loss"),
        (life(1, restored=0), "nothing was restored"),
        (life(4, restored=2), "step 3 has loss None"),
        (life(3, restored=2, picture={"model/w": torch.ones(2)}), "at the end model/w of rank 0 differs"),
        (Life(failure=("ours", "the checkpoint lacks it")), "after the kill, after step 0: the checkpoint lacks it"),
    ],
)
def test_anything_else_is_wrong(resumed: Life, why: str) -> None:
    row = judged(ABOUT, [life(picture={"model/w": torch.zeros(2)})], [Life()], [resumed], STEPS)
    assert row.result == "wrong"
    assert why in row.why


def test_a_refusal_counts_only_in_time_and_by_our_own_error() -> None:
    early, late = Life(losses={1: 1.0}, failure=("ours", "no")), Life(losses={1: 1.0, 2: 2.0}, failure=("ours", "no"))
    other = Life(failure=("other", "KeyError: 'exp_avg'"))
    assert [judged(ABOUT, [one], [Life()], [Life()], STEPS).result for one in (early, late, other)] == [
        "rejected",
        "wrong",
        "wrong",
    ]
    resized = (*ABOUT[:2], "resized")
    assert judged(resized, [life()], [Life()], [Life(failure=("ours", "no"))], STEPS).result == "rejected"


def test_over_ranks_samples_are_compared_by_rank_and_at_another_size_together() -> None:
    def drawn(*parts: list[int]) -> list[Life]:
        return [life(samples=dict.fromkeys(range(1, STEPS + 1), part), restored=2) for part in parts]

    whole = drawn([1, 2], [3, 4])
    assert judged(ABOUT, whole, drawn([], []), drawn([3, 4], [1, 2]), STEPS).result == "wrong"
    resized = (*ABOUT[:2], "resized")
    assert judged(resized, whole, drawn([], []), drawn([1], [2, 3], [4]), STEPS).result == "exact"
    assert judged(resized, whole, drawn([], []), drawn([1], [2, 2], [4]), STEPS).result == "wrong"


def test_pictures_differ_where_a_name_a_type_or_a_value_does() -> None:
    one = {"a": torch.ones(2), "b": 1}
    assert unlike(one, dict(one), 0.0) is None
    assert unlike(one, {"a": torch.ones(2)}, 0.0) == "b"
    assert unlike(one, one | {"a": torch.ones(2).double()}, 0.0) == "a"
    assert unlike(one, one | {"a": torch.ones(2) + 1e-6}, 1e-12) == "a"


def test_a_row_of_two_changes_of_the_world_is_judged_as_resized_and_says_them() -> None:
    about = (*ABOUT[:2], world_of(3, 2, 3))
    assert about[2] == "3→2→3"
    ranks = [life() for _ in range(3)]
    row = judged(about, ranks, [Life()] * 3, [life(5, restored=3) for _ in range(3)], STEPS)
    assert (row.result, row.why) == ("wrong", "went on from step 3, then step 4 has loss None, undisturbed 4.0")
    again = judged(about, ranks, [Life()] * 3, [life(5, restored=4) for _ in range(3)], STEPS)
    assert (again.result, again.why) == ("exact", "equal to 1e-12; 3→2→3 ranks")
    refused = judged(about, ranks, [Life()] * 3, [Life(failure=("ours", "each rank's own"))], STEPS)
    assert refused.result == "rejected"
