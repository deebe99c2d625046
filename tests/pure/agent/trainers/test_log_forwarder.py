"""What of the trainers' output reaches stdout, and what is said of the rest."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.agent.trainers import log_forwarder
from surefoot.agent.trainers.log_forwarder import LogForwarder, LogRateLimit


def forwarded(forwarder: LogForwarder, *paths: Path) -> list[str]:
    forwarder.start()
    for rank, path in enumerate(paths):
        forwarder.start_forwarding(path, rank)
    forwarder.close(30.0)
    assert isinstance(forwarder.out, io.StringIO)
    return forwarder.out.getvalue().splitlines()


def test_every_rank_s_lines_bear_their_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"{rank}").write_text(f"first of {rank}\nsecond of {rank}\nno end of line")
    lines = forwarded(LogForwarder(io.StringIO()), tmp_path / "0", tmp_path / "1")
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] {text}" for text in (f"first of {rank}", f"second of {rank}", "no end of line")]


def test_what_is_left_out_is_said_and_the_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * 99 + "\n" + "short\n")
    lines = forwarded(LogForwarder(io.StringIO(), LogRateLimit(rate=0.0, burst=50.0)), path)
    assert lines[0] == "[rank 0] short"
    assert lines[1].startswith("[surefoot] 1 lines (")
    assert path.read_text().startswith("xxx")


def test_a_failed_rank_s_last_lines_are_shown_only_if_something_was_left_out(tmp_path: Path) -> None:
    for name, burst in (("whole", 1e6), ("cut", 0.0)):
        path = tmp_path / name
        path.write_text("the error\n")
        forwarder = LogForwarder(io.StringIO(), LogRateLimit(rate=0.0, burst=burst))
        forwarder.start()
        forwarder.start_forwarding(path, 3)
        forwarder.stop_forwarding(path)
        forwarder.show_tail(path, 3)
        forwarder.close(30.0)
        assert isinstance(forwarder.out, io.StringIO)
        assert forwarder.out.getvalue().count("[rank 3] the error") == 1


def test_a_file_that_becomes_too_long_keeps_its_newest_lines_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_forwarder, "MAX_FILE_BYTES", 10_000)
    monkeypatch.setattr(log_forwarder, "KEPT_BYTES", 1_000)
    path = tmp_path / "log"
    with open(path, "ab", buffering=0) as trainer:
        trainer.write(b"".join(b"line %d\n" % number for number in range(2_000)))
        lines = forwarded(LogForwarder(io.StringIO()), path)
        trainer.write(b"goes on\n")
    first, *kept = path.read_text().splitlines()
    assert first.startswith("[surefoot] ")
    assert path.stat().st_size < 2_000
    assert kept[-2:] == ["line 1999", "goes on"]
    assert [line for line in lines if "] line" in line] == [f"[rank 0] line {number}" for number in range(2_000)]


def test_a_line_without_end_is_shown_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("y" * 100_000)
    lines = forwarded(LogForwarder(io.StringIO()), path)
    assert len(lines) > 1
    assert sum(line.count("y") for line in lines) == 100_000


def test_lines_written_later_are_shown_later(tmp_path: Path) -> None:
    path = tmp_path / "log"
    forwarder = LogForwarder(io.StringIO())
    forwarder.start()
    forwarder.start_forwarding(path, 0)
    path.write_text("later\n")
    assert isinstance(forwarder.out, io.StringIO)
    deadline = time.monotonic() + 30
    while "later" not in forwarder.out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread's look at a file is announced by nobody
    forwarder.close(30.0)
    assert forwarder.out.getvalue() == "[rank 0] later\n"


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(1, 3000)), max_size=60))
def test_no_more_is_shown_than_the_rate_allows_and_nothing_is_lost_from_the_count(
    lines: list[tuple[float, int]],
) -> None:
    flow, now, shown, hidden = LogRateLimit(rate=100.0, burst=1000.0), 0.0, 0, 0
    for pause, size in lines:
        now += pause
        if flow.admit(size, now):
            shown += size
        else:
            hidden += size
    assert shown <= 1000.0 + now * 100.0 + 1e-6
    said = flow.report_skipped(now, is_final=True)
    assert (said is None) == (hidden == 0)
    assert said is None or f"({hidden} bytes)" in said
