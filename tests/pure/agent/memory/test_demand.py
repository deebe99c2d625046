"""What a worker's ranks need for their saves, and how such numbers are written."""

from __future__ import annotations

import pytest

from surefoot.agent.staging_memory import (
    StagingNeeds,
    missing_bytes,
    with_denial,
    with_grant,
    with_request,
    with_staged,
)
from surefoot.protocol.text import amount


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_600, "1.00 MB"),
        (8 << 30, "8.59 GB"),
        (14_400_000_000, "14.4 GB"),
        (5 * 10**18, "5000 PB"),
    ],
)
def test_bytes_are_written_with_three_digits(size: int, text: str) -> None:
    assert amount(size) == text


def test_a_worker_s_save_is_known_once_every_rank_has_asked() -> None:
    book = with_request(StagingNeeds(), 0, 100, ranks=2)
    assert book.save_bytes == 0
    book = with_request(book, 1, 300, ranks=2)
    assert book.save_bytes == 400
    assert with_staged(book, 1, 250).save_bytes == 350


def test_a_rank_that_has_not_asked_yet_is_expected_to_want_what_the_others_do() -> None:
    book = with_request(StagingNeeds(), 1, 100, ranks=3)
    assert missing_bytes(book, {}) == {0: 100, 1: 100, 2: 100}
    assert missing_bytes(book, {0: 100}) == {1: 100, 2: 100}
    book = with_request(with_request(book, 0, 40, 3), 2, 60, 3)
    assert missing_bytes(book, {}) == {0: 40, 1: 100, 2: 60}
    assert missing_bytes(book, {0: 39, 1: 100, 2: 70}) == {0: 40}


def test_a_refusal_lasts_until_that_rank_has_memory() -> None:
    book = with_denial(with_denial(StagingNeeds(), 2, "too much"), 1, "too much too")
    assert book.unstaged == "too much too"
    assert with_grant(book, 1).unstaged == "too much"
    assert with_grant(with_grant(book, 1), 2).unstaged == ""
