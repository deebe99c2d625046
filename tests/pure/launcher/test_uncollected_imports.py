"""Imports of the warm process run without Python's collector, and leave it as the program wants it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.launcher import fork_server
from surefoot.launcher.fork_server import Preloaded

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)
    (gc.enable if enabled else gc.disable)()


def importing(monkeypatch: pytest.MonkeyPatch, imported: Callable[[], None]) -> None:
    """Has the warm process find a program whose import does that."""

    def preload(source: Path | None) -> Preloaded:
        assert gc.get_threshold()[0] == 0, "nothing is collected meanwhile"
        imported()
        return Preloaded(0.0, ())

    monkeypatch.setattr(fork_server, "preload_modules", preload)


def test_the_collector_is_as_before_behind_imports_that_do_not_care(monkeypatch: pytest.MonkeyPatch) -> None:
    importing(monkeypatch, lambda: None)
    fork_server._preload_without_gc(None)
    assert (gc.isenabled(), gc.get_threshold()) == (True, USUAL)


def test_a_program_that_turns_it_off_has_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    importing(monkeypatch, gc.disable)
    fork_server._preload_without_gc(None)
    assert not gc.isenabled()


def test_a_program_that_sets_it_has_it_as_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    importing(monkeypatch, lambda: gc.set_threshold(5000, 20, 30))
    fork_server._preload_without_gc(None)
    assert gc.get_threshold() == (5000, 20, 30)


def test_imports_that_raise_leave_it_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    importing(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fork_server._preload_without_gc(None)
    assert gc.get_threshold() == USUAL
