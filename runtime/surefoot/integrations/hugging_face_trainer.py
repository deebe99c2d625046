"""Protects a transformers `Trainer` at any world size.

    trainer = Trainer(model=model, args=args, train_dataset=data)
    protect_trainer(trainer, global_batch_size=64)
    trainer.train()

Trainer's own checkpoints count batches of one world size. Restored at another size, they skip the wrong samples.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from surefoot.checkpointer import Checkpointer
from surefoot.data import ElasticLoader
from surefoot.errors import ConfigurationError

LOG_ENTRIES = 1000
"""Limit on the entries of `log_history` in a checkpoint, the newest ones, since each save writes them."""

_IGNORED_LABEL = -100
_OVERRIDDEN = ("_init_training_state", "_prepare_for_training", "_load_callback_state")
_SHARED_FIELDS = (
    "global_step",
    "best_metric",
    "best_global_step",
    "total_flos",
    "num_input_tokens_seen",
    "stateful_callbacks",
)
_PER_RANK_SUFFIXES = ("_runtime", "_per_second")


def protect_trainer(trainer: Trainer, global_batch_size: int, **options: Any) -> None:
    """Makes `trainer.train()` continue from the newest checkpoint.

    `train(resume_from_checkpoint=...)` keeps its meaning for a job's first start; once the job has a checkpoint of its
    own, that one is restored. An epoch consists of whole steps: its remaining samples begin the next epoch.

    Args:
        trainer: built, and not yet trained.
        global_batch_size: samples of one optimizer step, over all ranks and all accumulated batches. It replaces
            `per_device_train_batch_size`, whose total depends on the world size.
        options: of Checkpointer (`folder`, `interval_steps`, `keep`, …), or further objects to save (`ema=`).

    Raises:
        ConfigurationError: `global_batch_size` is not divisible, or this release of transformers is not supported.
    """
    accumulated = trainer.args.gradient_accumulation_steps
    if global_batch_size % accumulated:
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} is no multiple of gradient_accumulation_steps={accumulated}"
        )
    missing = [name for name in _OVERRIDDEN if not callable(getattr(trainer, name, None))]
    if missing:
        raise ConfigurationError(
            f"this release's Trainer has no {', '.join(missing)}: transformers 5 is what protect_trainer knows"
        )
    protected = _ProtectedTrainer(trainer, global_batch_size, options)
    trainer.get_train_dataloader = protected.batches
    trainer._init_training_state = protected.init_training_state
    trainer._prepare_for_training = protected.prepared_before
    trainer.training_step = protected.training_step
    trainer.compute_loss = protected.compute_loss
    trainer.args.ignore_data_skip = True  # the loader restores its position; Trainer would skip the batches again
    trainer.callback_handler.callbacks.insert(0, protected.callback)  # before callbacks that log and evaluate


class _ProtectedTrainer:
    """Replaces the methods of one Trainer that start training and load batches."""

    def __init__(self, trainer: Trainer, global_batch: int, options: Mapping[str, Any]) -> None:
        self._trainer, self._global_batch, self._options = trainer, global_batch, dict(options)
        self._original_methods = {
            name: getattr(trainer, name)
            for name in ("get_train_dataloader", *_OVERRIDDEN, "training_step", "compute_loss")
        }
        self.callback = _StepCallback(self)
        self._epochs: _Epochs | None = None
        self._prepared_training: Any = None
        self._checkpointer: Checkpointer | None = None
        self._batch_weight: float | None = None
        self._step_loss: torch.Tensor | None = None

    def batches(self) -> _Epochs:
        """Returns batches of Trainer's own data set and collator, in the elastic order."""
        dataloader, args = self._original_methods["get_train_dataloader"](), self._trainer.args
        accumulated = args.gradient_accumulation_steps
        loader = ElasticLoader(
            dataloader.dataset,
            self._global_batch // accumulated,
            seed=args.seed if args.data_seed is None else args.data_seed,
            collate_fn=dataloader.collate_fn,
            batches_per_step=accumulated,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
        )
        self._epochs = _Epochs(loader, max(1, len(dataloader.dataset) // self._global_batch), accumulated)
        return self._epochs

    def init_training_state(
        self, max_steps: int, steps_in_epoch: int, epochs: int, resumed: str | None, trial: Any
    ) -> tuple[int, int]:
        """Restores before the training loop; returns the epoch to begin in, and Trainer's resume marker."""
        trainer, epoch_batches = self._trainer, self._epochs
        assert epoch_batches is not None, "Trainer makes its loader first"
        self._original_methods["_init_training_state"](max_steps, steps_in_epoch, epochs, resumed, trial)
        self._prepared_training = self._original_methods["_prepare_for_training"](max_steps, epoch_batches, resumed)
        self._checkpointer = Checkpointer(**self._objects(epoch_batches), **self._options)
        # restore here: Trainer has prepared all objects, and has not taken a step yet
        restored = self._checkpointer.restore()
        if restored:
            trainer._load_callback_state()
        elif trainer.state.global_step:  # Trainer's own checkpoint, of a job that has none of ours yet
            samples_consumed = trainer.state.global_step * self._global_batch
            epoch_batches.loader.load_state_dict({**epoch_batches.loader.state_dict(), "position": samples_consumed})
        step = trainer.state.global_step
        trainer.state.epoch = step / steps_in_epoch
        epoch_batches.begin(step)
        if step >= max_steps:  # a finished run: Trainer's loop checks the limit only after a step
            return epochs, 1
        # 1 after a restore of random generators: with 0 Trainer would load those of its own checkpoint over them
        return step // steps_in_epoch, 1 if restored else 0

    def prepared_before(self, *_: Any, **__: Any) -> Any:
        """Returns the result prepared by `init_training_state`, which Trainer calls just before."""
        return self._prepared_training

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Runs Trainer's own step, with the loss weighted by this rank's share of the batch."""
        assert self._epochs is not None
        self._batch_weight = self._epochs.weights.popleft()
        if self._batch_weight == 0.0 and "labels" in inputs:  # a filler batch: exclude its labels from the loss
            inputs = {**inputs, "labels": torch.full_like(inputs["labels"], _IGNORED_LABEL)}
        try:
            loss: torch.Tensor = self._original_methods["training_step"](model, inputs, num_items_in_batch)
        finally:
            self._batch_weight = None
        self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Multiplies Trainer's own loss by the weight of this rank's share.

        A mean over the tokens of all ranks needs no weight.
        """
        loss = self._original_methods["compute_loss"](model, inputs, *args, **kwargs)
        is_token_mean = (
            kwargs.get("num_items_in_batch") is not None and self._trainer.args.average_tokens_across_devices
        )
        if self._batch_weight is None or self._batch_weight == 1.0 or is_token_mean:
            return loss
        return (loss[0] * self._batch_weight, *loss[1:]) if isinstance(loss, tuple) else loss * self._batch_weight

    def step_ends(self) -> None:
        """Reports and saves the step, before Trainer logs and evaluates it."""
        assert self._checkpointer is not None, "a step follows the loop's begin"
        assert self._epochs is not None
        state, loss = self._trainer.state, self._step_loss
        state.epoch = state.global_step / self._epochs.steps
        self._step_loss = None
        self._checkpointer.step(None if loss is None else self._trainer.accelerator.reduce(loss, "mean"))

    def wait_for_staging(self) -> None:
        """Waits until the last save is copied, before code that may exchange weights."""
        if self._checkpointer is not None:
            self._checkpointer.wait_for_staging()

    def close(self) -> None:
        """Saves the last step and waits until it is in its tiers."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _objects(self, epochs: _Epochs) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "model": trainer.model,
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "scaler": trainer.accelerator.scaler,
            "loader": epochs.loader,
            "trainer": _SharedState(trainer),
        }


class _Epochs:
    """Divides an endless loader into epochs of whole steps, and records the weight of each batch.

    Args:
        loader: endless.
        steps: number of optimizer steps per epoch.
        accumulated: number of batches per step.
    """

    def __init__(self, loader: ElasticLoader, steps: int, accumulated: int) -> None:
        self.loader, self.steps, self._accumulated = loader, steps, accumulated
        self.weights: deque[float] = deque(maxlen=accumulated)
        self._remaining_steps = steps

    def begin(self, step: int) -> None:
        """Makes the next iterator end with the epoch that contains `step`."""
        self._remaining_steps = self.steps - step % self.steps

    def __len__(self) -> int:
        return self.steps * self._accumulated

    def __iter__(self) -> Iterator[Any]:
        remaining_batches, self._remaining_steps = self._remaining_steps * self._accumulated, self.steps
        for batch in islice(self.loader, remaining_batches):
            self.weights.append(batch.weight)
            yield batch.data


class _SharedState:
    """Saves the part of Trainer's own state that is the same on all ranks."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, str]:
        """Returns the state as one JSON text, because log entries may have any JSON value."""
        state = self._trainer.state
        shared_fields = {name: getattr(state, name) for name in _SHARED_FIELDS}
        newest = [
            {key: value for key, value in entry.items() if not key.endswith(_PER_RANK_SUFFIXES)}
            for entry in state.log_history[-LOG_ENTRIES:]
        ]
        return {"json": json.dumps({**shared_fields, "log_history": newest}, sort_keys=True)}

    def load_state_dict(self, saved: Mapping[str, str]) -> None:
        """Restores into the existing state object, to which callbacks refer."""
        for name, value in json.loads(saved["json"]).items():
            setattr(self._trainer.state, name, value)


class _StepCallback(TrainerCallback):
    """Calls a protected Trainer after each step and at the end of training."""

    def __init__(self, protected: _ProtectedTrainer) -> None:
        self._protected = protected

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._protected.step_ends()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._protected.close()
