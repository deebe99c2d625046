"""Defines `Checkpointer`, the object that a training script restores and saves with."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from types import TracebackType
from typing import Any, Literal

import torch

from surefoot.checkpointer import restoring, usage_checks
from surefoot.checkpointer.activity_monitor import ActivityMonitor
from surefoot.checkpointer.backends import LibraryOptions, connect_backend
from surefoot.checkpointer.library_mode.end_signal import EndSignal
from surefoot.checkpointer.plain_values import PlainValues
from surefoot.checkpointer.replica_check import ReplicaCheck, ReplicaPolicy
from surefoot.checkpointer.restoring import ShareReads
from surefoot.checkpointer.saving import ChangeWatch, Saver, StepSaves
from surefoot.checkpointer.step_reports import (
    InjectedFaults,
    LossCheck,
    StepNumberCheck,
    StepReports,
    announce_pause,
    plain_number,
)
from surefoot.checkpointer.training_watch import TrainingWatch
from surefoot.checkpointer.usage_checks import (
    Stateful,
    StateGuard,
    fail_at_exit,
    register_at_exit,
    reject_shuffle_buffers,
    stateful_objects,
)
from surefoot.errors import ConfigurationError, LastStepNotSaved
from surefoot.ipc.save_backend import SaveBackend
from surefoot.ipc.trainer_messages import Attached
from surefoot.protocol.identities import Checkpoint
from surefoot.state import AllowedDifferences, Program

_log = logging.getLogger(__name__)


# ---- whether the state is that of the last step ----------------------------------------------------------------------
# Describes a rank's step and world for the program's own log.


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where one rank is, and what of it is saved."""

    generation: int
    """Counts the worlds that this job had; 1 is the first."""
    rank: int
    world_size: int
    """Number of ranks."""
    restored_step: int
    """What this world goes on from; 0: from the beginning."""
    step: int
    """Finished steps."""
    saved_step: int
    """The newest whose state this rank has copied; 0: none yet."""
    stall_seconds: float | None
    """What the newest save took of the training's time; None: none yet."""

    @classmethod
    def of(cls, attached: Attached, step: int, saved_step: int, stall_seconds: float | None) -> RankStatus:
        """Puts together what the agent said and what the rank did since."""
        restored = attached.parent.step if attached.parent else 0
        return cls(attached.generation, attached.rank, attached.world_size, restored, step, saved_step, stall_seconds)


# ---- skipped batches -------------------------------------------------------------------------------------------------
# Leaves out the batches that spoiled a world before, behind a rollback. Called below once the state is restored. Fed
# the same batches again, a run would turn NaN at the same step again.


def skip_batches(objects: Mapping[str, Any], link: SaveBackend) -> None:
    """Has every loader that can leave out what the assignment says.

    Where none can, training goes on with the same batches, and that is said once.
    """
    steps = link.attached.skip_steps
    if not steps:
        return
    able = {name: o for name, o in objects.items() if callable(getattr(o, "skip_steps", None))}
    for loader in able.values():
        loader.skip_steps(steps)
    if link.attached.rank:
        return
    if able:
        text = (
            f"the batches of {steps} steps are left out by {', '.join(able)}: they led to a loss that was rolled back"
        )
        _log.warning("%s", text)
        link.report_notice("DataSkipped", text)
        return
    text = (
        f"the batches of {steps} steps led to a loss that was rolled back, and no object given to Checkpointer can leave"
        " them out: they are trained on again. Give it a loader with skip_steps(steps), as surefoot.ElasticLoader"
    )
    _log.warning("%s", text)
    link.report_notice("DataSkipUnsupported", text)


# ---- checkpointer ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _OpenStep:
    """An epoch's last step, whose save waits for the script to finish the epoch (a scheduler, a validation)."""

    step: int
    is_due: bool
    at_barrier: bool
    interval_exponent: int
    draws_ahead: bool
    """Whether the step is saved with the generators as they were before a block of `prefetching()`."""
    ending: EndSignal | None = None
    """Whom the save is for; None: no SIGTERM came."""


CLOSE_SECONDS = 120.0
"""How long `close` waits for what is staged to reach its tiers."""


class Checkpointer:
    """Saves and restores a training program, at any world size.

        checkpointer = surefoot.Checkpointer(model=model, optimizer=optimizer, loader=loader)
        start = checkpointer.restore()
        ...
            checkpointer.step(loss)

    Without it a job whose node dies begins at step 0, and one that changes its size restores nothing.

    Args:
        **objects: what is saved, by name: anything with `state_dict` and `load_state_dict` (`model=`, `optimizer=`,
            `scheduler=`, `ema=`, a second optimizer).
        per_rank: names of objects, or patterns of tensor names, that differ on each rank. They return to the same rank of
            a world of the same size and otherwise stay as the program built them.
        reset_on_resize: names of loaders that restore() may begin anew in a world of another size, which may lose and repeat
            samples. A loader's state is each rank's own unless it is elastic.
        seed: what random generators are derived from in a world of another size.
        replicas: which ranks hold the same plain tensors as this one, where that is not every rank (pipeline stages,
            experts): a process group, a device mesh or ranks, or such by pattern of names.
        values: a dict of plain values and generators, saved at each step; restore() updates it.
        replica_check: what tensors do that ranks save together and that differ: `refuse` the first step, `warn`, or `off`.
        folder: where checkpoints go without an agent, a path or URI; `job_uid` is the job's name below it.
        interval_steps: steps from save to save without an agent, and `keep` how many checkpoints stay.
        share_reads: alike on all ranks: those that restore the same bytes read each of them once and exchange them.

    Raises:
        ConfigurationError: an object has no state or a name that cannot be, or no folder is named.
        SurefootError: the agent, or the claim of an epoch, refused this rank.
    """

    def __init__(
        self,
        *,
        per_rank: tuple[str, ...] = (),
        reset_on_resize: tuple[str, ...] = (),
        seed: int = 0,
        replicas: Any = None,
        values: MutableMapping[str, Any] | None = None,
        replica_check: ReplicaPolicy = "refuse",
        folder: str | None = None,
        interval_steps: int | None = None,
        keep: int | None = None,
        job_uid: str | None = None,
        share_reads: bool | ShareReads = False,
        link: SaveBackend | None = None,
        **objects: Stateful | None,
    ) -> None:
        named = stateful_objects(objects, _OPTIONS)
        if values is not None:
            named["values"] = PlainValues(values)
        if not named:
            raise ConfigurationError("Checkpointer was given nothing to save: name a model=, an optimizer=, …")
        reject_shuffle_buffers(named, reset_on_resize)
        usage_checks.reject_below_one(interval_steps=interval_steps, keep=keep)
        options = LibraryOptions(folder, interval_steps, keep, job_uid)
        self._connected = connect_backend(options, link)
        self._backend = self._connected.backend
        about = self._backend.attached
        self._program = Program(
            named, (about.rank, about.world_size), tuple(per_rank), seed, replicas, tuple(reset_on_resize)
        )
        self._saver = Saver(self._program, self._backend, about.rank)
        self._replica_check = ReplicaCheck(self._program, named, self._backend, replica_check)
        self._hooks = [
            o.register_step_pre_hook(lambda *_: self._before_change())
            for o in self._program.optimizers
            if hasattr(o, "_optimizer_step_pre_hooks")
        ]
        self._share = (share_reads if isinstance(share_reads, ShareReads) else ShareReads()) if share_reads else None
        self._guard = StateGuard(named, _weak_call(self._before_batch))
        self._step = 0
        self._losses = LossCheck(self._backend)
        self._step_numbers = StepNumberCheck()
        self._saves = StepSaves(self._saver, self._backend, self._guard)
        self._changes = ChangeWatch(self._program, self._backend)
        self._training = TrainingWatch(named, self._backend)
        self._open_step: _OpenStep | None = None
        self._skipped_at_epoch_end = False
        pace = ActivityMonitor(named.values(), about.rank, about.world_size)
        self._reports = StepReports(self._saver, self._backend, self._guard, self._losses, pace)
        self._named, self._faults = named, InjectedFaults()
        self._thread = threading.get_ident()
        """The thread that trains: a save begins in no other one."""
        self._stepped = False
        self._restored = False
        self._closed = False
        self._disowned = False
        register_at_exit(self._at_exit)
        usage_checks.disable_after_fork(self)

    # ---- what a script calls ---------------------------------------------------------------------------------------

    def restore(self, *, strict: bool = True, optional: tuple[str, ...] = (), convert_dtypes: bool = False) -> int:
        """Restores the job's restore point into the named objects, every byte verified.

        Args:
            strict: False: any object or tensor may differ as `optional` ones may.
            optional: names of objects (`ema`) and patterns of tensors (`model/head.*`) that the checkpoint, or the
                program, may lack or have in another shape: they stay as the program built them, or are left out, and
                each is said.
            convert_dtypes: reads floating point numbers in the program's precision.

        Returns:
            The number of finished steps; 0 at the start of a job.

        Raises:
            StateMismatch: names the first difference that is not allowed.
            Unreadable: no copy of some byte is good, and no older checkpoint may be taken.
        """
        self._reject_when_closed("restore")
        self._open_step = None
        self._program.mark_built()
        fit = AllowedDifferences(strict, tuple(optional), convert_dtypes)
        # tensors that are made in inference mode could not be trained; of a model that was made in it they must be
        is_inference = torch.is_inference_mode_enabled() and any(
            entry.local_part().is_inference() for entry in self._program.weights()
        )
        with torch.inference_mode(is_inference):
            self._step = restoring.restore(self._program, self._connected, self._share, fit)
        self._restored = True
        self._losses.load_history(self._program)
        skip_batches(self._named, self._backend)
        if self._step > 0:
            self._saver.prepare_first()
        self._guard.mark_restored(self._step)
        self._training.mark_restored()
        self._reports.begin()
        return self._step

    def step(self, loss: torch.Tensor | float | None = None, grad_norm: torch.Tensor | float | None = None) -> int:
        """Counts and reports a finished optimizer step, and saves it when due.

        Args:
            loss: the loss that this rank called `backward()` on, with `Batch.weight` where shares are uneven; or one value that is
                equal on all ranks. A number or a tensor of one element. The step's loss is the mean over ranks; it is reported, and
                watched for NaN and spikes.
            gradient_norm: what `clip_grad_norm_` returned; watched for spikes.

        Returns:
            The step's number; the first is 1.

        Raises:
            ConfigurationError: restore() was not called although a checkpoint is there, a loader prefetched batches, or ranks
                have different tensors that they save together.
            OtherWriter: without an agent, another program has begun a newer generation in this job's folder.
            StateNotRestorable: an object's state could be saved and not restored.
        """
        self._reject_when_closed("step")
        self._step_numbers.check(loss)
        self._thread = threading.get_ident()
        if not self._restored and not self._stepped:
            usage_checks.require_restored(self._backend.attached.parent)
        with self._reports.not_counted():
            self._finish_step(loss, grad_norm)
        self._connected.refuse_overtaken()
        ending = self._connected.ending
        if ending is not None and ending.is_due(self._step):
            if self._open_step is not None:
                self._open_step.ending = ending
            else:
                self._save_and_end(ending)
        self._faults.slow()
        self._faults.hang()
        return self._step

    def _finish_step(self, loss: torch.Tensor | float | None, gradient_norm: torch.Tensor | float | None) -> None:
        self._finish_epoch()  # where no optimizer and no loader of this program announced the step
        self._step += 1
        self._guard.mark_step()
        stall = self._saves.stall_of_last_save()
        if not self._stepped:
            self._stepped = True
            self._program.check_restorable()
            self._saver.prepare_first()
        self._training.mark_step(has_loss=loss is not None)
        told = plain_number(loss)
        self._losses.check(self._step, told, plain_number(gradient_norm), self._program)
        at_barrier = self._backend.is_barrier_at(self._step)
        skipped, self._skipped_at_epoch_end = self._skipped_at_epoch_end, False
        level = self._saves.interval_exponent
        is_due = self._saves.schedule.is_due(self._step, level)
        self._replica_check.check_step(self._step, is_saved=is_due or at_barrier)
        if self._guard.step_ends_epoch:
            draws_ahead = self._program.has_generators_for(self._step)
            self._open_step = _OpenStep(self._step, is_due, at_barrier, level, draws_ahead)
        elif at_barrier:
            self._saves.save_and_wait(self._step)
        elif is_due:
            skipped = self._saves.save_if_slot_free(self._step, level)
            self._changes.record(self._step, skipped)
        for warning in self._program.take_warnings():
            _log.warning("%s", warning)
            self._backend.report_notice("ProgramChanged", warning)
        self._reports.report(self._step, told, stall, skipped, level)
        if at_barrier and self._open_step is None:
            self._backend.wait_at_barrier(self._step)

    def _finish_epoch(self) -> None:
        """Saves an epoch's last step, where that is due, with what the script has done since."""
        open_step, self._open_step = self._open_step, None
        if open_step is None:
            return
        with self._reports.not_counted():
            if open_step.at_barrier:
                self._saves.save_and_wait(open_step.step)
                self._backend.wait_at_barrier(open_step.step)
            elif open_step.is_due and open_step.ending is None:
                skipped = self._saves.save_if_slot_free(open_step.step, open_step.interval_exponent)
                self._skipped_at_epoch_end = skipped
        if open_step.ending is not None:
            self._save_and_end(open_step.ending)

    def _before_batch(self, is_first: bool) -> None:
        """Called by loaders before they fetch a batch: what the script did since `step()` is done."""
        if self._closed or threading.get_ident() != self._thread:
            return
        if self._open_step is None:
            self._changes.check()
            return
        self._save_generators()
        if is_first:
            self._finish_epoch()
        # else it is another loader's batch: it may be the next step's, or be dropped as the epoch ends with this loader's

    def _save_generators(self) -> None:
        """Has an epoch's last step saved with the generators as they are now."""
        if self._open_step is not None and not self._open_step.draws_ahead:
            self._program.save_generators_for_next(self._step - 1)

    def _save_and_end(self, ending: EndSignal) -> None:
        """Saves the step at which SIGTERM ends this rank, and passes the signal on."""
        with self._reports.not_counted():
            self._saver.wait()
            saved = self._saver.staged_step == self._step or self._saves.save_and_wait(self._step)
            saved = self._backend.wait_for_flush(ending.seconds_left) and saved
        _log.warning("SIGTERM: step %d is %s", self._step, "saved" if saved else "not saved in time")
        ending.wait_for_others()
        ending.pass_on()

    @contextmanager
    def prefetching(self) -> Iterator[None]:
        """Marks a draw of random numbers that belongs to the next step.

        The step is saved with the generators as they were when the last such block of it began: a script that draws its
        next batch early draws the same one again after a restart.
        """
        self._save_generators()
        self._finish_epoch()
        self._program.save_generators_for_next(self._step)
        yield

    @contextmanager
    def pause(self, reason: str, max_seconds: float | None = None) -> Iterator[None]:
        """Announces that no step is to be expected: an evaluation, an export.

        Call it on every rank, also where one rank alone works. Without it a world that stands still is ended after
        `healthPolicy.stepTimeoutSeconds`, or sooner where every rank's stack says that it hangs.

        Args:
            what: a word or two for status and logs.
            at_most_seconds: after so long it counts as a hang; None: after `stepTimeoutSeconds`.

        Raises:
            ConfigurationError: `what` is empty, or the time not above zero.
        """
        self._reject_in_child("pause")
        with self._reports.not_counted(), announce_pause(self._backend, reason, max_seconds) as spent:
            yield
        self._reports.exclude_seconds(spent.seconds)

    def epoch_end(self) -> None:
        """Saves the last step of an epoch, where that is due, with what the script has done since `step()`.

        Loaders with `by_epoch` do this when the next epoch's first batch is requested, and `close()` does it. Call it on
        every rank where that comes late: before an evaluation that belongs to no epoch, or an export.
        """
        self._reject_in_child("epoch_end")
        self._save_generators()
        self._finish_epoch()

    def save_now(self) -> bool:
        """Saves the last step on this rank, whether due or not.

        Call it on every rank, behind `step` and before the next batch. Weights exchanged for good follow it.

        Returns:
            False if it failed, or came too late: what is no longer the state of that step is not saved.
        """
        self._reject_when_closed("save_now")
        if not self._saves.may_save(self._step):
            return False
        self._save_generators()
        if self._open_step is not None and (self._open_step.at_barrier or self._open_step.ending is not None):
            self._finish_epoch()
        self._open_step = None
        with self._reports.not_counted():
            is_staged = self._saves.save_and_wait(self._step)
        self._changes.record(self._step, skipped=not is_staged)
        return is_staged

    def wait_for_staging(self) -> None:
        """Waits until the tensors of the last save may be changed.

        Saves go on behind the training until the next optimizer step, and what changes before that costs the save: it
        is dropped. A program that changes parameters or optimizer state in between calls this first: weights swapped
        for validation (EMA, SWA), clipped weights, a load_state_dict. An optimizer's own step needs no such call.
        """
        with self._reports.not_counted():
            self._saver.join()

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that can be restored now, or None."""
        found = self.list()
        return found[-1] if found else None

    def list(self) -> list[Checkpoint]:
        """Lists the checkpoints that can be restored now, oldest first."""
        return restoring.list_restorable(self._connected)

    @property
    def status(self) -> RankStatus:
        """Where this rank is, without asking anybody."""
        return RankStatus.of(self._backend.attached, self._step, self._saver.staged_step, self._saves.stall_seconds)

    def load_weights(
        self,
        model: torch.nn.Module,
        step: int | None = None,
        name: str = "model",
        *,
        strict: bool = True,
        convert_dtypes: bool = False,
    ) -> int:
        """Reads one object's weights, saved as `name`, into `model`.

        Args:
            model: whose parameters and buffers are filled; `name` is what it was saved as.
            step: whose weights; None: the newest checkpoint's.
            strict: False: tensors that are missing or have another shape (a new head) stay as they are, and are named.
            convert_dtypes: reads floating point numbers in the model's precision.

        Returns:
            The step that the weights are of.

        Raises:
            ConfigurationError: there is no such checkpoint.
            StateMismatch: names the first difference that is not allowed.
        """
        return restoring.load_weights(
            self._connected, step, model, name, AllowedDifferences(strict, (), convert_dtypes)
        )

    def close(self, *, save: bool = True) -> None:
        """Saves the last step unless another has begun, flushes and detaches.

        `save=False`: without a save, as the objects hold something else by now.

        Raises:
            LastStepNotSaved: without an agent, and after everything is closed: the save did not reach its folder.
        """
        if self._closed:
            return
        self._reports.close()
        self._saver.wait()
        parent = self._backend.attached.parent
        missing = self._saver.staged_step != self._step and self._step != (parent.step if parent else 0)
        offered = not missing or (save and self._saves.may_save(self._step))
        if missing and offered:
            self._save_generators()
            self._finish_epoch()
            self._saver.wait()
            missing = self._saver.staged_step != self._step
        if missing and offered:
            self._saves.save_and_wait(self._step)
        self._end(flush_seconds=CLOSE_SECONDS, offered=offered)
        if offered and not self._disowned:
            self._connected.refuse_unsaved(self._step)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if kind is None:
            self.close()
        else:
            self._end(flush_seconds=1.0)  # what an exception interrupted is not a state to save
        return False

    # ---- how -------------------------------------------------------------------------------------------------------

    def disable_after_fork(self) -> None:
        """Disables this object in a forked child: the parent owns its resources."""
        self._disowned = self._closed = True
        atexit.unregister(self._at_exit)
        self._reports.disable_after_fork()
        self._backend.disable_after_fork()
        if self._connected.ending is not None:
            self._connected.ending.disable_after_fork()

    def _reject_in_child(self, call: str) -> None:
        if self._disowned:
            raise usage_checks.called_in_child(call)

    def _reject_when_closed(self, call: str) -> None:
        self._reject_in_child(call)
        if self._closed:
            raise ConfigurationError(
                f"{call}() was called after close(): nothing is saved any more. Call close() after the last step, or build"
                " another Checkpointer"
            )

    def _before_change(self) -> None:
        if self._disowned:
            return
        self._finish_epoch()
        self._guard.mark_optimizer_step()
        with self._reports.not_counted():
            self._saver.join()

    def _end(self, flush_seconds: float, offered: bool = False) -> None:
        if self._disowned:
            return
        self._closed, self._open_step = True, None
        self._reports.close()
        atexit.unregister(self._at_exit)
        for hook in self._hooks:
            hook.remove()
        self._training.close()
        self._saver.wait()
        if not self._backend.wait_for_flush(flush_seconds):
            _log.warning("what was staged did not reach its tiers within %g s", flush_seconds)
        self._saver.close()
        self._connected.close(self._step, offered)
        ending = self._connected.ending
        if ending is not None:
            ending.finish()

    def _at_exit(self) -> None:
        """A script that ends without `close` is closed; one that ends by an exception saves nothing more: the interpreter
        leaves it in `sys.last_value`, and so does the agent's way of running a program."""
        if self._closed:
            return
        if getattr(sys, "last_value", None) is not None:
            self._end(flush_seconds=1.0)
            return
        try:
            self.close()
        except LastStepNotSaved as unsaved:
            _log.error("%s", unsaved)
            fail_at_exit()


def _weak_call(method: Callable[[bool], None]) -> Callable[[bool], None]:
    """Calls a method as long as its object is there: loaders outlive the Checkpointer that they are given to."""
    weak = weakref.WeakMethod(method)

    def call(is_first: bool) -> None:
        if (target := weak()) is not None:
            target(is_first)

    return call


_OPTIONS = tuple(n for n, p in signature(Checkpointer.__init__).parameters.items() if p.kind is Parameter.KEYWORD_ONLY)
