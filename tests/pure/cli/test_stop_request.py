"""A stop that is asked for by a signal always reaches the loop that is to stop, wherever the signal finds the program."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from surefoot.errors import SurefootError
from surefoot.memory_server.provisioning import HolderAdmin
from surefoot_operator.cli.command_base import StopRequest, signals_ignored, stop_requests

DEADLINE_SECONDS = 20.0


@contextmanager
def signal_after(seconds: float, number: signal.Signals) -> Iterator[None]:
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextmanager
def default_interrupt() -> Iterator[None]:
    """SIGINT as from a terminal: a shell that runs the tests in the background has them ignore it."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


class RaisesInItsDestructor:
    """Gives a signal's exception a place where the interpreter prints and drops it, as redis-py's connections do."""

    def __del__(self) -> None:
        sum(range(200))


def test_a_stop_at_any_moment_arrives() -> None:
    """KeyboardInterrupt was lost in 6 of 400 such moments: redis-py's connections drop exceptions in `__del__`."""
    moments = random.Random(7)
    with default_interrupt():
        for _ in range(200):
            number = moments.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            with stop_requests() as stop, signal_after(moments.uniform(0.001, 0.02), number):
                deadline = time.monotonic() + DEADLINE_SECONDS
                while not stop.requested:
                    assert time.monotonic() < deadline, f"{number.name} was lost"
                    RaisesInItsDestructor()
                    admin = HolderAdmin("127.0.0.1", 1, "x", 1.0)
                    try:
                        admin.instance()
                    except (SurefootError, ValueError):
                        pass
                    finally:
                        admin.close()


def test_a_stop_ends_a_wait_early() -> None:
    with stop_requests() as stop, signal_after(0.05, signal.SIGTERM):
        began = time.monotonic()
        assert stop.wait(DEADLINE_SECONDS)
        assert time.monotonic() - began < DEADLINE_SECONDS / 2
        assert stop.wait(DEADLINE_SECONDS), "a request stays one"
        with pytest.raises(KeyboardInterrupt):
            stop.raise_if_requested()


def test_a_second_signal_raises_where_the_program_is() -> None:
    """A call that does not return would never let the loop see the flag."""
    stop = StopRequest()
    stop.on_signal(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(signal.SIGINT, None)
    stop.close()


def test_handlers_return_to_what_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with stop_requests(), signals_ignored():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, former)
