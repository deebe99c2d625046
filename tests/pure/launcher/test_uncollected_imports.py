"""Imports of the warm process run without Python's collector, and leave it as the program wants it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from surefoot.launcher.fork_server import without_collector

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)
    (gc.enable if enabled else gc.disable)()


def make_imports(imports: Callable[[], None]) -> None:
    with without_collector():
        assert gc.get_threshold()[0] == 0, "nothing is collected meanwhile"
        imports()


def test_the_collector_is_as_before_behind_imports_that_do_not_care() -> None:
    make_imports(lambda: None)
    assert (gc.isenabled(), gc.get_threshold()) == (True, USUAL)


def test_a_program_that_turns_it_off_has_it_off() -> None:
    make_imports(gc.disable)
    assert not gc.isenabled()


def test_a_program_that_sets_it_has_it_as_it_was_set() -> None:
    make_imports(lambda: gc.set_threshold(5000, 20, 30))
    assert gc.get_threshold() == (5000, 20, 30)


def test_imports_that_raise_leave_it_as_before() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_imports(interrupted)
    assert gc.get_threshold() == USUAL
