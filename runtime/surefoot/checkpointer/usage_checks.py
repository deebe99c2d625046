"""Disables a Checkpointer in processes that its rank forks.

Used by `checkpointer` alone. A child that the program forks has its parent's sockets, exit handlers and objects, and neither
its threads nor its place in the world. One that ends by `sys.exit` would say goodbye in its parent's name, and nothing
would be saved from then on. DataLoader workers and `multiprocessing` leave by `os._exit`; a plain `os.fork` does not.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Protocol

import torch

from surefoot.checkpointer.plain_values import SavedGenerator, is_generator
from surefoot.data.data_source import buffered_rows
from surefoot.errors import ConfigurationError
from surefoot.protocol.identities import Checkpoint


class Inherited(Protocol):
    """An object that a forked child inherits and must not use."""

    def disable_after_fork(self) -> None:
        """Releases the parent's objects in the child, right after the fork.

        Sends nothing, takes no lock and joins no thread: the parent's threads do not exist here.
        """
        ...


_watched: weakref.WeakSet[Inherited] = weakref.WeakSet()


def disable_after_fork(owner: Inherited) -> None:
    """Disowns `owner` in every process that is forked from now on."""
    _watched.add(owner)


def called_in_child(call: str) -> ConfigurationError:
    """The error of a call in a process that a rank forked."""
    return ConfigurationError(
        f"{call}() was called in process {os.getpid()}, which a rank forked and which is no rank itself:"
        " only the process that built the Checkpointer may use it"
    )


def _disown_all() -> None:
    for owner in list(_watched):
        owner.disable_after_fork()


# once for the process: what is registered here stays for ever
os.register_at_fork(after_in_child=_disown_all)


# ---- exit of the program ---------------------------------------------------------------------------------------------
# Closes a Checkpointer at interpreter exit, while threads can still be started. The standard library ends every thread
# pool before `atexit` calls anybody: what is closed only there can neither write the parts of its last save side by
# side nor list what is old.


def register_at_exit(handler: Callable[[], None]) -> None:
    """Calls a method before threads are joined at exit, and from `atexit`.

    The handler must tolerate two calls. The first registration holds only a weak reference to its object.
    """
    atexit.register(handler)
    weak: weakref.WeakMethod[Any] = weakref.WeakMethod(handler)

    def call() -> None:
        method = weak()
        if method is not None:
            method()

    # how concurrent.futures itself hears of the end; called in reverse order, so ahead of its own handler
    threading._register_atexit(call)  # type: ignore[attr-defined]  # typeshed leaves it out


_failed = threading.Event()


def fail_at_exit() -> None:
    """Has the process end with code 1.

    An error that is raised while the interpreter ends is printed, and does not change the code.
    """
    _failed.set()


def _end_with_failure() -> None:
    if _failed.is_set():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_end_with_failure)  # as early as possible: the last to register is the first to be called


# ---- use before a restore --------------------------------------------------------------------------------------------
# Refuses calls that would lose or repeat steps. Each says what to do instead. Called by `checkpointer` before anything
# is done.


def require_restored(parent: Checkpoint | None) -> None:
    """Refuses training from the beginning beside older steps.

    Retention would remove those, under their numbers.
    """
    if parent is not None:
        raise ConfigurationError(
            f"step() was called and restore() was not, and this job has {parent}: call restore() before training,"
            " or begin another job (folder=, or job_uid=)"
        )


def check_pause_arguments(what: str, at_most_seconds: float | None) -> None:
    """Refuses a pause without a word, or of no time."""
    if not what.strip() or (at_most_seconds is not None and not 0.0 < at_most_seconds < math.inf):
        raise ConfigurationError("pause() takes a word for what is done, and seconds above zero or none")


def reject_below_one(**options: int | None) -> None:
    """Raises ConfigurationError for a number of steps or checkpoints that is below 1."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"{name}={value}: it must be at least 1, or left out for the default")


# ---- objects that are named to the checkpointer ----------------------------------------------------------------------
# Validates and unwraps the objects that are named to a Checkpointer.


class Stateful(Protocol):
    """Gives and takes its state: modules, optimizers, schedulers, loaders, own objects."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def stateful_objects(objects: Mapping[str, Any], options: Iterable[str]) -> dict[str, Any]:
    """Validates the objects to save and removes wrappers without state.

    Raises ConfigurationError for a name that is no identifier, and for an object without state, which a mistyped option
    is.
    """
    found = {}
    for name, subject in objects.items():
        if subject is None:
            continue
        if not name.isidentifier():
            raise ConfigurationError(f"{name!r} cannot name an object: give it a name as Python's own, like model=")
        close = get_close_matches(name, options, n=1, cutoff=0.75)
        if close and not hasattr(subject, "state_dict"):
            raise ConfigurationError(f"Checkpointer has no option {name!r}: did you mean {close[0]}?")
        found[name] = SavedGenerator(subject) if is_generator(subject) else _unwrap(name, subject)
        if isinstance(subject, torch.nn.Module):
            _reject_unsuitable(name, subject)
    return found


def _reject_unsuitable(name: str, module: torch.nn.Module) -> None:
    """Raises ConfigurationError for a module whose tensors do not exist yet, or are not Python's to reach."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"{name} is a scripted module: give Checkpointer the module that was scripted, which has the same tensors, as"
            f" {name}=module, next to scripted = torch.jit.script(module)"
        )
    lazy = next((n for n, p in module.named_parameters() if isinstance(p, torch.nn.UninitializedParameter)), None)
    if lazy is not None:
        raise ConfigurationError(
            f"{name}'s parameter {lazy} has no shape yet, as that of a lazy module before its first batch: call the model on one"
            " batch, then build the optimizer and the Checkpointer"
        )


def _unwrap(name: str, subject: Any) -> Any:
    """Accelerate's prepared objects: an optimizer is the one that it steps, a loader has state only if torchdata's is
    beneath it."""
    if not type(subject).__module__.startswith("accelerate."):
        return subject
    if isinstance(subject, torch.optim.Optimizer):
        inner = getattr(subject, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):
            return inner
        raise ConfigurationError(
            f"{name} is Accelerate's and wraps a {type(inner).__name__}: give the optimizer itself"
        )
    if hasattr(subject, "base_dataloader") and not getattr(subject, "use_stateful_dataloader", False):
        raise ConfigurationError(
            f"{name} was prepared by Accelerate and keeps no state: give DataLoaderConfiguration("
            "use_stateful_dataloader=True) to the Accelerator, or an ElasticLoader to Checkpointer"
        )
    return subject


# ---- loaders of others -----------------------------------------------------------------------------------------------
# Refuses third-party loaders whose state does not hold their full position. A shuffle buffer holds rows that were read
# and not handed out yet: a state without them loses those rows at each restart. A batch that a prefetcher took counts
# as consumed in the state of a loader that knows nothing of steps, and is lost too.


def reject_shuffle_buffers(objects: Mapping[str, Any], anew: Collection[str]) -> None:
    """Raises ConfigurationError for a loader with a shuffle buffer.

    One that `anew` names, or that buffers a single row, is allowed.
    """
    for name, subject in objects.items():
        rows = 0 if name in anew else buffered_rows(subject)
        if rows > 1:
            raise ConfigurationError(
                f"{name} ({type(subject).__name__}) shuffles in a buffer of {rows} rows, and its state does not contain the buffer:"
                " each restart would lose the rows in it. Shuffle its shards alone (shuffle(buffer_size=1)), or"
                " shuffle when the data set is written, or give an ElasticLoader a map-style data set, or accept with"
                f" Checkpointer(reset_on_resize=({name!r},)) that samples are lost"
            )


class PrefetchCheck:
    """Checks torchdata's loaders for prefetched batches once, after a job's first step."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._loaders = {n: o for n, o in objects.items() if type(o).__module__.startswith("torchdata.")}

    def first_step_ends(self) -> None:
        """Raises ConfigurationError where more batches were taken than a step uses."""
        for name, loader in self._loaders.items():
            taken = getattr(getattr(loader, "_iterator", None), "_num_yielded", None)
            batches_per_step = getattr(loader, "batches_per_step", 1)
            if isinstance(taken, int) and taken > batches_per_step:
                raise ConfigurationError(
                    f"{taken} batches were taken from {name} ({type(loader).__name__}) before the first step ended, and"
                    " its state counts them all: what a prefetcher took ahead would be lost at each restart. If the step"
                    f" trained on all of them, set {name}.batches_per_step = {taken}; else take it without a prefetcher,"
                    " or give an ElasticLoader with batches_per_step=1"
                )


# ---- state guard -----------------------------------------------------------------------------------------------------
# Tracks whether the program still holds the state of its last step. Only while it stands may its state be saved as that
# step's: saved later, under the same number, a gradient would count twice, or buffers be those of a step that never
# ended. Asked by `checkpointer` at each step and wherever it saves outside of one.

Samples = tuple[tuple[int, int], ...]
"""Positions [start, stop) of the global order, one pair for each batch."""

PASSES_SHARE = 0.01
"""Of the time, at most, that reckoning passes over the data takes: a stream of many lanes takes a while."""

PASSES_SECONDS = 1.0
"""So old the passes told may be, whatever they cost."""


class StateGuard:
    """Compares loaders and optimizers with where the last step left them.

    Loaders that can count by steps are switched to it.
    """

    def __init__(self, objects: Mapping[str, Any], before_batch: Callable[[bool], None] | None = None) -> None:
        """`before_batch`: called by loaders before they fetch a batch; True: the first one of a new iterator."""
        self._loaders = {name: o for name, o in objects.items() if callable(getattr(o, "count_by_step", None))}
        self._foreign: PrefetchCheck | None = PrefetchCheck(objects)
        """Until a step has ended: what was restored had its first step before."""
        self._optimizing = False
        self._at_step = 0
        for loader in self._loaders.values():
            loader.count_by_step() if before_batch is None else loader.count_by_step(before_batch)
        self.step_ends_epoch = False
        """Whether a loader's iterator ended with the last step: what the script does next belongs to that step."""
        self.consumed: Samples | None = None
        """What this rank's share of the last step was; None if the program has no `loader` that tells."""
        self.step_samples: int | None = None
        """How many samples that share had; None likewise."""
        self.step_span: tuple[int, int] | None = None
        """Positions [start, stop) of all ranks' shares together, where a loader tells that steps' sizes may differ."""
        self._epochs: float | None = None
        self._reckon_at = -math.inf

    def mark_restored(self, step: int) -> None:
        """Takes the present state for that of a restored step; 0: none."""
        if step > 0:
            self._foreign = None
        self._optimizing, self._at_step = False, self._batches_yielded()
        self.step_ends_epoch = False

    def mark_step(self) -> None:
        """Takes the present state for that of the step that ends here.

        Raises ConfigurationError where it is uncertain which batches the step used.
        """
        if self._foreign is not None:
            self._foreign.first_step_ends()
            self._foreign = None
        samples_by_loader = {name: loader.end_step() for name, loader in self._loaders.items()}
        self.consumed = samples_by_loader.get("loader")
        self.step_samples = getattr(self._loaders.get("loader"), "step_samples", None)
        self.step_span = getattr(self._loaders.get("loader"), "step_range", None)
        self.step_ends_epoch = any(getattr(loader, "step_ends_epoch", False) for loader in self._loaders.values())
        self._optimizing, self._at_step = False, self._batches_yielded()

    def epochs(self, now: float) -> float | None:
        """Passes over the data of the source furthest behind; None: unknown.

        Reckoned again as soon as that is little of the time since; older ones would stand beside a step that is not
        theirs.
        """
        count_epochs = getattr(self._loaders.get("loader"), "consumed_epochs", None)
        if callable(count_epochs) and now >= self._reckon_at:
            self._epochs = min(count_epochs(), default=None)
            self._reckon_at = now + min(PASSES_SECONDS, (time.perf_counter() - now) / PASSES_SHARE)
        return self._epochs

    def mark_optimizer_step(self) -> None:
        """Tensors change from here on."""
        self._optimizing = True

    def changed_by(self) -> str | None:
        """Names what changed the state since the last step; None: nothing.

        An exception being handled is taken to have come within a step where no loader counts what it hands out, and
        within the end of an epoch where one is open.
        """
        if self._optimizing:
            return "an optimizer has begun"
        if self._batches_yielded() != self._at_step:
            return "a batch was taken from the loader"
        if (self.step_ends_epoch or not self._loaders) and sys.exc_info()[0] is not None:
            return "an exception is being handled"
        return None

    def _batches_yielded(self) -> int:
        return sum(loader.batches_yielded for loader in self._loaders.values())
