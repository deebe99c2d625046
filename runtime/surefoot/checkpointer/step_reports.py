"""Reports each finished step of one rank to its save backend.

Used by `checkpointer`. What is no part of a step (a restore, a pause) must not count as its time: hangs are judged by it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from surefoot import metrics
from surefoot.checkpointer.activity_monitor import ActivityMonitor
from surefoot.checkpointer.saving import Saver
from surefoot.checkpointer.usage_checks import StateGuard, check_pause_arguments
from surefoot.errors import ConfigurationError
from surefoot.fault_files import consume_fault, fault_file
from surefoot.ipc.save_backend import SaveBackend
from surefoot.ipc.trainer_messages import PauseReport, StepReport
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.progress import AnomalyKind, AnomalyRun, Progress, RecentValues, describe_spike
from surefoot.state import Program

_log = logging.getLogger(__name__)


# ---- pauses ----------------------------------------------------------------------------------------------------------
# Announces that a script makes no step for a while. An evaluation of minutes looks like a hang to whoever counts steps
# alone.

MAX_REASON_CHARACTERS = 64


@dataclass(slots=True)
class PauseTimer:
    """How long the pause took, known at its end."""

    seconds: float = 0.0


@contextmanager
def announce_pause(link: SaveBackend, what: str, at_most_seconds: float | None) -> Iterator[PauseTimer]:
    """Tells the begin and the end of a pause, however it ends.

    Raises:
        ConfigurationError: `what` is empty, or the time not above zero.
    """
    check_pause_arguments(what, at_most_seconds)
    began, spent = time.perf_counter(), PauseTimer()
    link.report_pause(PauseReport(what.strip()[:MAX_REASON_CHARACTERS], at_most_seconds))
    try:
        yield spent
    finally:
        link.report_pause(PauseReport("", None))
        spent.seconds = time.perf_counter() - began


# ---- injected faults -------------------------------------------------------------------------------------------------
# Injects faults that only a trainer can do to itself. Used below and by `checkpointer`, for `surefoot local`. Nothing
# outside of a process can turn its model NaN, have it work for longer, or stand still in the middle of its program; and
# what a run does about that should be seen before a long training needs it.

SLOW_SECONDS = 0.1
"""How much longer each step takes a rank that is made slow."""

_FOR_EVER_SECONDS = 1e8


class InjectedFaults:
    """Looks at each step whether this trainer shall misbehave.

    Without SUREFOOT_INJECTED_FAULTS_FOLDER, which `surefoot local` alone sets, it does nothing.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._spoiling, self._slowing, self._hanging = (
            fault_file(kind, environment) for kind in ("nan", "slow", "hang")
        )

    def slow(self) -> None:
        """Takes longer for a step, as long as that is asked for."""
        if self._slowing is not None and self._slowing.exists():
            time.sleep(SLOW_SECONDS)

    def hang(self) -> None:
        """Does not return, or not for so long, where asked.

        It is one wait: a loop would read and compute, and so look alive.
        """
        seconds_text = consume_fault(self._hanging)
        if seconds_text is not None:
            time.sleep(float(seconds_text) if seconds_text else _FOR_EVER_SECONDS)

    def spoil(self, program: Program) -> None:
        """Turns the first tensor of numbers NaN, where asked."""
        if consume_fault(self._spoiling) is None:
            return  # nobody asked, or another rank of this node was faster
        floating = (e.local_part() for e in program.weights() if e.local_part().is_floating_point())
        with torch.no_grad():
            next(floating).fill_(float("nan"))


# ---- check of the loss -----------------------------------------------------------------------------------------------
# Judges each step's loss and gradient norm, and reports what is odd. A run whose loss is NaN goes on for days, and its
# checkpoints push out the last good one.

_LOSS, _NORM = "loss", "gradient norm"


class LossCheck:
    """Judges a rank's steps; rank 0 reports what is odd, once."""

    def __init__(self, backend: SaveBackend) -> None:
        self._backend = backend
        self._recent = {_LOSS: RecentValues(), _NORM: RecentValues()}
        self._last: AnomalyKind = ""
        self._faults = InjectedFaults()
        self.anomalies = AnomalyRun()

    def check(self, step: int, loss: float | None, gradient_norm: float | None, program: Program) -> AnomalyKind:
        """Judges the step that ends.

        Args:
            step: its number.
            loss: of it, if the script told any.
            gradient_norm: likewise.
            program: what is saved of that step says so.

        Returns:
            What is odd about it; empty: nothing, or nothing was told.
        """
        self._faults.spoil(program)
        kind, text = self._judged(step, loss, gradient_norm)
        for name, value in ((_LOSS, loss), (_NORM, gradient_norm)):
            if value is not None:
                self._recent[name] = self._recent[name].with_value(value)
        if kind == "not-finite":
            metrics.nonfinite_losses.inc()
        elif kind:
            metrics.loss_spikes.inc()
        if kind and kind != self._last and self._backend.attached.rank == 0:
            said = f"{text}: checkpoints from here on hold what led to it"
            _log.warning("%s", said)
            self._backend.report_notice("LossNonFinite" if kind == "not-finite" else "LossSpike", said)
        self._last = kind
        self.anomalies = self.anomalies.with_step(step, kind, text)
        program.suspect, program.recent, program.anomalies = bool(kind), self.history, self.anomalies
        return kind

    @property
    def history(self) -> dict[str, list[float]]:
        """What later steps are judged by; to be saved with the step."""
        return {name: list(recent.values) for name, recent in self._recent.items() if recent.values}

    def load_history(self, program: Program) -> None:
        """Takes up what the restored checkpoint says of earlier steps.

        Without it a restart would make odd ones sound: nobody else remembers them.
        """
        for name in self._recent:
            self._recent[name] = RecentValues(tuple(float(value) for value in program.recent.get(name) or ()))
        self.anomalies = program.anomalies

    def _judged(self, step: int, loss: float | None, gradient_norm: float | None) -> tuple[AnomalyKind, str]:
        if loss is not None and not math.isfinite(loss):
            return "not-finite", f"the loss of step {step} is {loss}"
        for name, value in ((_LOSS, loss), (_NORM, gradient_norm)):
            # a gradient norm that is no number is a spike: a scaler of mixed precision leaves such a step out by itself
            far = "" if value is None else describe_spike(name, _number(value), self._recent[name])
            if far:
                return "spike", f"step {step} has a {far}"
        return "", ""


def _number(value: float) -> float:
    """NaN is not above any limit, and further out than any number."""
    return math.inf if math.isnan(value) else value


def plain_number(value: Any) -> float | None:
    """Returns a loss or norm as a number.

    Raises:
        ConfigurationError: It is a dict of losses, a tensor of several elements, a text or the like.
    """
    if value is None:
        return None
    kind = type(value).__name__
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise ConfigurationError(
            f"step() was given a {kind}{shape} as the loss: give the number, or tensor of one element, that backward() was"
            " called on, as step(loss)"
        ) from None


class StepNumberCheck:
    """Recognizes a step number that is given as the loss, as other libraries' `step(step)` takes it."""

    def __init__(self) -> None:
        self._last: int | None = None

    def check(self, loss: Any) -> None:
        """Compares an integer with the one of the step before.

        Raises:
            ConfigurationError: It is the next number.
        """
        last, self._last = self._last, loss if isinstance(loss, int) and not isinstance(loss, bool) else None
        if last is not None and self._last == last + 1:
            raise ConfigurationError(
                f"step({loss}) was called after step({last}): it takes the loss, not the number of the step, which it counts and"
                " returns itself. Call step(loss), or step() without one"
            )


# ---- step reports ----------------------------------------------------------------------------------------------------


class StepReports:
    """Tells of steps, and measures what each took."""

    def __init__(
        self, saver: Saver, link: SaveBackend, guard: StateGuard, losses: LossCheck, pace: ActivityMonitor
    ) -> None:
        self._saver, self._link, self._guard, self._losses = saver, link, guard, losses
        self._pace = pace
        self._since = time.perf_counter()

    def begin(self) -> None:
        """The next step begins now."""
        self._since = time.perf_counter()

    def exclude_seconds(self, seconds: float) -> None:
        """So many seconds are no part of the step that follows."""
        self._since += seconds

    def not_counted(self) -> AbstractContextManager[None]:
        """Has nobody look meanwhile whether this rank works."""
        return self._pace.not_counted()

    def close(self) -> None:
        self._pace.close()

    def disable_after_fork(self) -> None:
        self._pace.disable_after_fork()

    def report(self, step: int, loss: float | None, stall: float | None, skipped: bool, level: int) -> None:
        """Tells of a finished step; the next one begins now."""
        now = time.perf_counter()
        progress = Progress(
            step=step,
            loss=loss,
            step_seconds=now - self._since,
            interval_exponent=level,
            stall_seconds=stall,
            closed_steps=ClosedSteps(self._saver.closed_step(step)),
            loss_is_finite=None if loss is None else math.isfinite(loss),
            epochs=self._guard.epochs(now),
            step_samples=self._guard.step_samples,
            **self._losses.anomalies.progress_fields,
            activities=self._pace.end_step(self._guard.step_samples),
        )
        self._link.report_step(StepReport(progress, self._guard.consumed, skipped, self._guard.step_span))
        self._since = now
