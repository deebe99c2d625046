"""Compares the objects that a program trains with those that it gave to the Checkpointer.

A checkpoint is complete and verified whatever it contains: an optimizer, model or loader that the loop uses and nobody gave is
missing after the next restart without a word. So each `step()` asks who stepped and who yielded batches since the last one:
torch calls one hook for every optimizer, and loaders count their batches. Each finding is reported once; a loader that stands
in for the given one is refused at the first step, before there is progress to lose. Nothing is reported on suspicion: an
optimizer within a given object, a skipped step of a GradScaler, or an evaluation between two steps are all as they should be.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from surefoot.data import consumed_batches
from surefoot.errors import ConfigurationError
from surefoot.ipc.save_backend import SaveBackend

_log = logging.getLogger(__name__)

CONFIRMING_STEPS = 2
"""Consecutive steps that show the same, before it is reported."""
SKIPPED_STEPS = 20
"""Steps that a GradScaler may skip at the start, as its first scale is far too large."""
_MAX_DEPTH = 3


class TrainingWatch:
    """Watches the optimizers and loaders of this process from step to step."""

    def __init__(self, objects: Mapping[str, Any], backend: SaveBackend) -> None:
        self._objects, self._backend = dict(objects), backend
        self._optimizers = [o for o in objects.values() if isinstance(o, torch.optim.Optimizer)]
        self._given = {id(optimizer) for optimizer in self._optimizers}
        self._stepped: dict[int, torch.optim.Optimizer] = {}
        """Optimizers that made a step since the last `step()`."""
        self._judged: set[int] = set()
        """Optimizers that need no further look."""
        self._reported: set[str] = set()
        self._steps = 0
        self._outside_streak = self._idle_streak = self._loader_streak = 0
        self._sample: tuple[torch.Tensor, torch.Tensor] | None = None
        """The smallest parameter of the given optimizers, and what it was when no optimizer stepped for the first time."""
        self._carried: tuple[torch.Tensor, torch.Tensor] | None = None
        """A parameter and its gradient, as they were at the last step without an optimizer's."""
        self._is_carried = False
        self._micro_steps, self._cycles = 0, list[int]()
        self._given_consumptions = [c for c in map(consumed_batches.consumption_of, objects.values()) if c is not None]
        others = {n: o for n, o in objects.items() if not isinstance(o, torch.nn.Module | torch.optim.Optimizer)}
        self._has_loader = any(hasattr(type(o), "__iter__") or name == "loader" for name, o in others.items())
        self._uncounted = consumed_batches.uncounted_batches()
        self._yielded: dict[int, int] = {}
        self.mark_restored()
        weak = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (watch := weak()) is not None:
                watch._before_step(optimizer)

        self._hook = register_optimizer_step_pre_hook(before_step)

    def close(self) -> None:
        """Observes no optimizer any more."""
        self._hook.remove()

    def mark_restored(self) -> None:
        """Counts from here: what a program did before its first step is no step."""
        self._stepped.clear()
        self._uncounted = consumed_batches.uncounted_batches()
        self._yielded = {id(c): c.batches_yielded for c in consumed_batches.all_consumptions()}

    def mark_step(self, has_loss: bool) -> None:
        """Judges the step that ends here.

        Args:
            has_loss: Whether the program passed a loss to `step()`, so that an optimizer must have stepped.

        Raises:
            ConfigurationError: At the first step, the batches came from another loader of the given loader's data set.
        """
        self._steps += 1
        stepped, self._stepped = self._stepped, {}
        self._judge_loaders()
        for optimizer in stepped.values():
            if id(optimizer) not in self._given and id(optimizer) not in self._judged:
                self._judge_optimizer(optimizer, stepped)
        if not stepped and has_loss and self._optimizers:
            self._judge_idle_step()
        elif stepped:
            self._idle_streak, self._sample = 0, None
            self._judge_cycle()

    # ---- optimizers ------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped[id(optimizer)] = optimizer
        if self._carried is not None:
            parameter, gradient = self._carried
            self._is_carried, self._carried = parameter.grad is gradient, None

    def _judge_optimizer(self, optimizer: torch.optim.Optimizer, stepped: Mapping[int, Any]) -> None:
        """Reports an optimizer that trains given parameters, or in place of the given optimizers, and was not given."""
        kind = type(optimizer).__name__
        if any(contains(o, optimizer) for o in self._objects.values()) or any(
            contains(optimizer, given) for given in self._optimizers
        ):
            self._judged.add(id(optimizer))  # a wrapper and what it wraps
            return
        if not optimizer.state:
            return  # nothing of it is lost
        parameters = _parameter_ids([optimizer])
        holders = [o for o in self._optimizers if _parameter_ids([o]) & parameters]
        names = [
            name
            for name, o in self._objects.items()
            if isinstance(o, torch.nn.Module) and any(id(p) in parameters for p in o.parameters())
        ]
        if holders and any(id(o) in stepped for o in holders):
            return  # two optimizers of one set of parameters, of which one works for the other
        if holders or names:
            what = f"steps parameters of {', '.join(names) or 'given optimizers'} and was not given to Checkpointer"
            instead = f", which was given {self._name_of(holders[0])} for them" if holders else ""
            self._report(
                "optimizer",
                f"an optimizer ({kind}) {what}{instead}: its state is in no checkpoint, and begins anew after each"
                " restart. Give it to Checkpointer, and build the Checkpointer after the last optimizer",
            )
            self._judged.add(id(optimizer))
            return
        if any(id(o) in stepped for o in self._optimizers):
            self._outside_streak = 0
            return
        self._outside_streak += 1
        if self._outside_streak >= CONFIRMING_STEPS:
            self._report(
                "model",
                f"an optimizer ({kind}) trains parameters that belong to no object given to Checkpointer, and no given"
                " optimizer makes a step: the trained model is in no checkpoint. Give Checkpointer the model and the"
                " optimizer that the loop uses, and build it after them",
            )

    def _name_of(self, optimizer: torch.optim.Optimizer) -> str:
        name = next(name for name, o in self._objects.items() if o is optimizer)
        return f"{name} ({type(optimizer).__name__})"

    def _judge_idle_step(self) -> None:
        """Looks at a step in which no optimizer made one: are gradients waiting, does anything train at all?"""
        self._micro_steps += 1
        trained = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
        with_gradient = [p for p in trained if p.grad is not None]
        if with_gradient and not self._cycles_known:
            parameter = min(with_gradient, key=torch.Tensor.numel)
            assert parameter.grad is not None
            self._carried = parameter, parameter.grad
        if "idle" in self._reported or not trained:
            return
        if self._sample is None:
            smallest = min(trained, key=torch.Tensor.numel)
            self._sample, self._idle_streak = (smallest, smallest.detach().clone()), 1
            return
        self._idle_streak += 1
        parameter, before = self._sample
        if not torch.equal(parameter.detach(), before):
            self._sample = None  # a captured graph, or a library of its own, trains it
            self._reported.add("idle")
        elif self._idle_streak >= SKIPPED_STEPS or (
            self._idle_streak >= CONFIRMING_STEPS and not with_gradient and not _has_scaler()
        ):
            self._report(
                "idle",
                f"step() was called {self._idle_streak} times without a step of an optimizer, and parameters of"
                f" {self._name_of(self._optimizers[0])} did not change. Call it once after each optimizer.step(), and give"
                " Checkpointer the model and the optimizer that the loop uses",
            )

    @property
    def _cycles_known(self) -> bool:
        return "micro" in self._reported

    def _judge_cycle(self) -> None:
        """Reports `step()` after each micro-batch: equal numbers of steps whose gradients a later optimizer step used."""
        micro_steps, self._micro_steps = self._micro_steps, 0
        is_carried, self._is_carried, self._carried = self._is_carried, False, None
        if not (micro_steps and is_carried):
            self._cycles.clear()
            return
        self._cycles.append(micro_steps)
        if self._cycles[-CONFIRMING_STEPS:] == [micro_steps] * CONFIRMING_STEPS:
            self._report(
                "micro",
                f"step() is called after each of {micro_steps + 1} micro-batches, and an optimizer steps after the last one:"
                " gradients are in no checkpoint, so a run that continues between loses those of the micro-batches"
                f" before. Call step() once after optimizer.step(), and give the loader batches_per_step={micro_steps + 1}",
            )

    # ---- loaders ---------------------------------------------------------------------------------------------------

    def _judge_loaders(self) -> None:
        """Finds a loader that yields the batches and was not given."""
        uncounted = consumed_batches.uncounted_batches()
        if uncounted == self._uncounted:
            self._loader_streak = 0
            return
        self._uncounted = uncounted
        yielded = {id(c): c.batches_yielded for c in consumed_batches.all_consumptions()}
        before, self._yielded = self._yielded, yielded
        active = [
            c
            for c in consumed_batches.all_consumptions()
            if not (c.by_step or c.is_state_taken or c.is_over) and c.batches_yielded > before.get(id(c), 0)
        ]
        given_active = any(c.batches_yielded > before.get(id(c), 0) for c in self._given_consumptions)
        sources = [c.source for c in self._given_consumptions if c.source is not None]
        if self._given_consumptions:
            active = [c for c in active if any(c.source is source for source in sources)]
        if given_active or not active or (self._has_loader and not self._given_consumptions):
            self._loader_streak = 0
            return
        self._loader_streak += 1
        if self._given_consumptions:
            text = (
                "the batches of this step came from another loader of the same data set than the one given to"
                " Checkpointer, which yielded none: the position of the loader in use is in no checkpoint, and after a restart"
                " its samples would be lost or repeated. Build one loader, give it to Checkpointer, and iterate over it in"
                " every epoch (by_epoch=True); ElasticLoader shuffles each epoch differently"
            )
            if self._steps == 1:
                raise ConfigurationError(text)
        else:
            text = (
                "the batches come from a loader that Checkpointer was not given: its position is in no checkpoint, so after a"
                " restart it begins at its first sample. Give it as loader="
            )
        if self._loader_streak >= CONFIRMING_STEPS:
            self._report("loader", text)

    def _report(self, key: str, text: str) -> None:
        if key in self._reported:
            return
        self._reported.add(key)
        _log.warning("%s", text)
        if self._backend.attached.rank == 0:
            self._backend.report_notice("TrainingNotSaved", text)


def contains(outer: Any, inner: Any, depth: int = _MAX_DEPTH) -> bool:
    """Returns whether an object is another one, or keeps it in its attributes."""
    if outer is inner:
        return True
    if depth == 0 or isinstance(outer, torch.Tensor | torch.nn.Module | str | bytes | int | float):
        return False
    return any(contains(value, inner, depth - 1) for value in _attributes(outer))


def _attributes(outer: Any) -> Iterator[Any]:
    if isinstance(outer, Mapping):
        values: Iterable[Any] = outer.values()
    elif isinstance(outer, list | tuple | set):
        values = outer
    else:
        values = [v for k, v in getattr(outer, "__dict__", {}).items() if k not in ("state", "param_groups")]
    for number, value in enumerate(values):
        if number > 1000:  # a long history has no optimizer
            return
        yield value


def _parameter_ids(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}


def _has_scaler() -> bool:
    """Returns whether the program has a GradScaler, which skips steps; slow, and asked once or twice."""
    return any(issubclass(type(o), torch.amp.GradScaler) and o.is_enabled() for o in gc.get_objects())
