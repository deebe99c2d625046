"""Protects a Lightning training at any world size.

    protection = SurefootCallback(surefoot.ElasticLoader(data, 64, by_epoch=True))
    Trainer(callbacks=[protection], use_distributed_sampler=False).fit(module, protection.batches)

Lightning's own checkpoints are of whole epochs, or have a position that its prefetcher has already passed.
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
    """Restores before the first step, and saves after each.

    A checkpoint contains the module, its optimizers and schedulers, the loader, the counters of Lightning's loops, the
    state of other callbacks, and the averaged model of WeightAveraging. The loss is weighted if ranks' shares are
    uneven. Because this is a `Checkpoint`, Lightning calls it after all other callbacks.

    Args:
        loader: source of the batches; pass `batches` to `fit`. It has one batch per step unless it was built with
            `batches_per_step`, which must equal `accumulate_grad_batches`.
        options: of Checkpointer (`folder`, `interval_steps`, `keep`, …), or further objects to save.
    """

    def __init__(self, loader: ElasticLoader | ElasticStream, **options: Any) -> None:
        self.batches = LightningBatches(loader)
        self._loader, self._options = loader, options
        self._checkpointer: Checkpointer | None = None
        self._batch_weight, self._step_loss, self._step = 1.0, 0.0, 0
        self._has_averaged_weights = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores this job's checkpoint, which takes precedence over `ckpt_path`.

        Raises:
            ConfigurationError: the module uses manual optimization.
        """
        if not pl_module.automatic_optimization:
            raise ConfigurationError(
                "SurefootCallback counts the steps of automatic optimization: with a module that optimizes by hand, give"
                " its objects to surefoot.Checkpointer and call step() there"
            )
        self._checkpointer = Checkpointer(**self._objects(trainer, pl_module), **self._options)
        if self._checkpointer.restore():
            trainer._checkpoint_connector._loaded_checkpoint = {}  # else ckpt_path's optimizers are restored later
            _finish_epoch(trainer.fit_loop.epoch_loop.batch_progress.current, self._loader)
            _ = getattr(self._loader, "epoch", 0)  # Lightning counts epochs itself, and restores the count
        self._step, self._step_loss = trainer.global_step, 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets this epoch's length in Lightning.

        Lightning keeps the length that it read at the start of the fit, but the lengths of epochs may differ by one.
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
        """Takes the weight of this batch, which was recorded when the batch was fetched."""
        self._batch_weight = self.batches.weights.popleft()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Weights the gradient, so that uneven shares give the global mean."""
        weight = self._batch_weight
        if weight != 1.0 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]  # torch has no type for it

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reports and saves the step, if the optimizer took one after this batch."""
        assert self._checkpointer is not None, "a fit has started"
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self._step_loss += 0.0 if loss is None else float(loss) * self._batch_weight
        if trainer.global_step == self._step:
            return  # gradients are being accumulated
        mean = trainer.strategy.reduce(
            torch.tensor(self._step_loss, device=pl_module.device, dtype=torch.float64), reduce_op="mean"
        )
        self._step, self._step_loss = trainer.global_step, 0.0
        self._checkpointer.step(mean)
        if _is_last(trainer):
            self._checkpointer.save_now()  # after this, averaged weights replace the trained ones

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits until the last save is copied, before averaged weights may be swapped in."""
        if self._checkpointer is not None:
            self._checkpointer.wait_for_staging()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits until the last save is in its tiers."""
        if self._checkpointer is not None:
            self._checkpointer.close(save=not self._has_averaged_weights)
            self._checkpointer = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Closes without a save, because the interrupted step is incomplete."""
        if self._checkpointer is not None:
            self._checkpointer.__exit__(type(exception), exception, None)
            self._checkpointer = None

    def _objects(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        objects: dict[str, Any] = {"model": module, "loader": self._loader}
        objects |= _numbered_names("optimizer", trainer.optimizers)
        objects |= _numbered_names("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs])
        objects["scaler"] = getattr(trainer.precision_plugin, "scaler", None)
        averaging = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
        objects |= _numbered_names("average", [callback._average_model for callback in averaging])
        self._has_averaged_weights = bool(averaging)
        objects["loops"] = trainer.fit_loop
        objects["callbacks"] = _CallbackStates([callback for callback in trainer.callbacks if callback is not self])
        return objects


class LightningBatches:
    """Yields each batch's data for `fit`, and records its weight for the callback.

    Args:
        loader: source of the batches, which also gives the length.
    """

    def __init__(self, loader: ElasticLoader | ElasticStream) -> None:
        self._loader = loader
        self.weights: deque[float] = deque()
        """Weights of batches that Lightning has fetched ahead and not trained on yet."""

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a stream has none and says so

    def __iter__(self) -> Iterator[Any]:
        self.weights.clear()
        for batch in self._loader:
            self.weights.append(batch.weight)
            yield batch.data


class _CallbackStates:
    """Saves the state of other callbacks, by their state keys."""

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = {callback.state_key: callback for callback in callbacks}

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the callbacks that have any."""
        states = {key: callback.state_dict() for key, callback in self._callbacks.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores the callbacks that still exist; others may have been removed."""
        for key, state in saved.items():
            if key in self._callbacks:
                self._callbacks[key].load_state_dict(state)


def _finish_epoch(batch_progress: Any, loader: Any) -> None:
    """Makes Lightning finish an epoch if the checkpoint already has every batch of it.

    The loader's length is then that of the next epoch. `batch_progress` has Lightning's batch counts of the epoch.
    """
    sampler = getattr(loader, "sampler", None)
    if sampler is None or not sampler.by_epoch or loader.position % sampler.size >= sampler.global_batch:
        return
    if 0 < batch_progress.ready < len(loader):
        batch_progress.ready = batch_progress.started = batch_progress.processed = batch_progress.completed = len(
            loader
        )


def _numbered_names(name: str, objects: list[Any]) -> dict[str, Any]:
    return {name if index == 0 else f"{name}{index + 1}": element for index, element in enumerate(objects)}


def _is_last(trainer: Trainer) -> bool:
    """Returns whether the fit is known to end after this batch."""
    is_last_epoch = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.should_stop or trainer.global_step == trainer.max_steps or (is_last_epoch and trainer.is_last_batch)
