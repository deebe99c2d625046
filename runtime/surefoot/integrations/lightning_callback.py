"""Protects a Lightning training at any world size.

    protection = SurefootCallback(surefoot.ElasticLoader(data, 64, by_epoch=True))
    Trainer(callbacks=[protection], use_distributed_sampler=False).fit(module, protection.batches)

Lightning's own checkpoints hold whole epochs, or a position that its prefetcher has already left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging

from surefoot.checkpointer import Checkpointer
from surefoot.data import ElasticLoader, ElasticStream
from surefoot.errors import ConfigurationError


class SurefootCallback(Checkpoint):
    """Restores before the first step, and saves behind each.

    A checkpoint holds the module, its optimizers and schedulers, the loader, the counters of Lightning's loops, the state
    of other callbacks, and the model that WeightAveraging keeps. The loss is weighted where ranks' shares are uneven.
    As a `Checkpoint`, Lightning calls it behind all other callbacks.

    Args:
        loader: what `fit` trains on; `fit` is given `batches`. One batch a step unless it was built with
            `batches_per_step`, which must be `accumulate_grad_batches`.
        options: of Checkpointer (`folder`, `interval_steps`, `keep`, …), or further objects to save.
    """

    def __init__(self, loader: ElasticLoader | ElasticStream, **options: Any) -> None:
        self.batches = LightningBatches(loader)
        self._loader, self._options = loader, options
        self._checkpointer: Checkpointer | None = None
        self._weight, self._loss, self._step = 1.0, 0.0, 0
        self._averages = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores this job's checkpoint, which goes before `ckpt_path`.

        Raises:
            ConfigurationError: optimization is by hand.
        """
        if not pl_module.automatic_optimization:
            raise ConfigurationError(
                "SurefootCallback counts the steps of automatic optimization: with a module that optimizes by hand, give"
                " its objects to surefoot.Checkpointer and call step() there"
            )
        self._checkpointer = Checkpointer(**self._objects(trainer, pl_module), **self._options)
        if self._checkpointer.restore():
            trainer._checkpoint_connector._loaded_checkpoint = {}  # else ckpt_path's optimizers and counters follow
            _finish_epoch(trainer.fit_loop.epoch_loop.batch_progress.current, self._loader)
        self._step, self._loss = trainer.global_step, 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives Lightning this epoch's length.

        It keeps the one that it read when the fit began, and they differ by one.
        """
        loop = trainer.fit_loop
        combined, limit, interval = loop._combined_loader, trainer.limit_train_batches, trainer.val_check_interval
        if combined is None or loop.max_batches == inf:
            return  # a stream: it has no length
        length = len(self.batches)
        length = min(length, limit) if isinstance(limit, int) else int(length * limit)
        combined.limits, loop.max_batches = [length], length
        if isinstance(interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(length * interval))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Takes the weight of this batch, which was fetched some time ago."""
        self._weight = self.batches.weights.popleft()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Weights the gradient, so that uneven shares give the global mean."""
        weight = self._weight
        if weight != 1.0 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]  # torch has no type for it

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a step, where the optimizer made one."""
        assert self._checkpointer is not None, "a fit has started"
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self._loss += 0.0 if loss is None else float(loss) * self._weight
        if trainer.global_step == self._step:
            return  # gradients are being accumulated
        mean = trainer.strategy.reduce(
            torch.tensor(self._loss, device=pl_module.device, dtype=torch.float64), reduce_op="mean"
        )
        self._step, self._loss = trainer.global_step, 0.0
        self._checkpointer.step(mean)
        if _is_last(trainer):
            self._checkpointer.save_now()  # averaged weights take the place of the trained ones behind this

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finishes the last save's copies: averaged weights may be swapped in."""
        if self._checkpointer is not None:
            self._checkpointer.wait_for_staging()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits until the last save is where it belongs."""
        if self._checkpointer is not None:
            self._checkpointer.close(save=not self._averages)
            self._checkpointer = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends without a save: what was interrupted is no step."""
        if self._checkpointer is not None:
            self._checkpointer.__exit__(type(exception), exception, None)
            self._checkpointer = None

    def _objects(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        named: dict[str, Any] = {"model": module, "loader": self._loader}
        named |= _numbered("optimizer", trainer.optimizers)
        named |= _numbered("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs])
        named["scaler"] = getattr(trainer.precision_plugin, "scaler", None)
        averaging = [one for one in trainer.callbacks if isinstance(one, WeightAveraging)]
        named |= _numbered("average", [one._average_model for one in averaging])
        self._averages = bool(averaging)
        named["loops"] = trainer.fit_loop
        named["callbacks"] = _CallbackStates([one for one in trainer.callbacks if one is not self])
        return named


class LightningBatches:
    """Gives `fit` each batch's data, and the callback its weight.

    Args:
        loader: what it iterates; its length is this one's.
    """

    def __init__(self, loader: ElasticLoader | ElasticStream) -> None:
        self._loader = loader
        self.weights: deque[float] = deque()
        """Of batches that were fetched and not trained on yet: as many as Lightning fetches ahead."""

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a stream has none and says so

    def __iter__(self) -> Iterator[Any]:
        self.weights.clear()
        for batch in self._loader:
            self.weights.append(batch.weight)
            yield batch.data


class _CallbackStates:
    """Saves what other callbacks keep, by their state keys."""

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = {one.state_key: one for one in callbacks}

    def state_dict(self) -> dict[str, Any]:
        """Of those that have any."""
        states = {key: one.state_dict() for key, one in self._callbacks.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Into those that are there: a callback may have been taken out."""
        for key, state in saved.items():
            if key in self._callbacks:
                self._callbacks[key].load_state_dict(state)


def _finish_epoch(trained: Any, loader: Any) -> None:
    """Has Lightning end an epoch of which a checkpoint has every batch: the loader's length is the next one's already.

    `trained` are the batches that Lightning has counted in its epoch.
    """
    sampler = getattr(loader, "sampler", None)
    if sampler is None or not sampler.by_epoch or loader.position % sampler.size >= sampler.global_batch:
        return
    if 0 < trained.ready < len(loader):
        trained.ready = trained.started = trained.processed = trained.completed = len(loader)


def _numbered(name: str, objects: list[Any]) -> dict[str, Any]:
    return {name if place == 0 else f"{name}{place + 1}": one for place, one in enumerate(objects)}


def _is_last(trainer: Trainer) -> bool:
    """Whether the fit ends behind this batch, as far as is known."""
    last_epoch = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.should_stop or trainer.global_step == trainer.max_steps or (last_epoch and trainer.is_last_batch)
