"""Protects a transformers `Trainer` at any world size.

    trainer = Trainer(model=model, args=args, train_dataset=data)
    protect_trainer(trainer, global_batch=64)
    trainer.train()

Trainer's own checkpoints count batches of one world size: at another they skip other samples than were trained on.
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
"""How many of the newest entries of `log_history` a checkpoint keeps: each save writes them."""

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
_OF_ONE_RANK = ("_runtime", "_per_second")


def protect_trainer(trainer: Trainer, global_batch_size: int, **options: Any) -> None:
    """Makes `trainer.train()` go on from the newest checkpoint.

    `train(resume_from_checkpoint=...)` keeps its meaning for a job's first start; once the job has a checkpoint of its
    own, that one is restored. An epoch is the whole steps in it: samples left over begin the next.

    Args:
        trainer: built, and not yet trained.
        global_batch: samples of one optimizer step, on all ranks and over all accumulated batches together. It takes the
            place of `per_device_train_batch_size`, which is another sum in a world of another size.
        options: of Checkpointer (`folder`, `interval_steps`, `keep`, …), or further objects to save (`ema=`).

    Raises:
        ConfigurationError: `global_batch` does not divide, or this release of transformers is built another way.
    """
    accumulated = trainer.args.gradient_accumulation_steps
    if global_batch_size % accumulated:
        raise ConfigurationError(
            f"global_batch={global_batch_size} is no multiple of gradient_accumulation_steps={accumulated}"
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
    trainer.args.ignore_data_skip = True  # the loader is where it was; Trainer would skip as many batches again
    trainer.callback_handler.callbacks.insert(0, protected.callback)  # ahead of those that log and evaluate


class _ProtectedTrainer:
    """Replaces the methods of one Trainer that begin and feed it."""

    def __init__(self, trainer: Trainer, global_batch: int, options: Mapping[str, Any]) -> None:
        self._trainer, self._global_batch, self._options = trainer, global_batch, dict(options)
        self._own = {
            name: getattr(trainer, name)
            for name in ("get_train_dataloader", *_OVERRIDDEN, "training_step", "compute_loss")
        }
        self.callback = _StepCallback(self)
        self._epochs: _Epochs | None = None
        self._prepared: Any = None
        self._checkpointer: Checkpointer | None = None
        self._weight: float | None = None
        self._loss: torch.Tensor | None = None

    def batches(self) -> _Epochs:
        """Trainer's own data set and collator, in the elastic order."""
        given, args = self._own["get_train_dataloader"](), self._trainer.args
        accumulated = args.gradient_accumulation_steps
        loader = ElasticLoader(
            given.dataset,
            self._global_batch // accumulated,
            seed=args.seed if args.data_seed is None else args.data_seed,
            collate_fn=given.collate_fn,
            batches_per_step=accumulated,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
        )
        self._epochs = _Epochs(loader, max(1, len(given.dataset) // self._global_batch), accumulated)
        return self._epochs

    def init_training_state(
        self, max_steps: int, steps_in_epoch: int, epochs: int, resumed: str | None, trial: Any
    ) -> tuple[int, int]:
        """Restores ahead of the loop, and tells it where to begin."""
        trainer, epochs_of = self._trainer, self._epochs
        assert epochs_of is not None, "Trainer makes its loader first"
        self._own["_init_training_state"](max_steps, steps_in_epoch, epochs, resumed, trial)
        self._prepared = self._own["_prepare_for_training"](max_steps, epochs_of, resumed)
        self._checkpointer = Checkpointer(**self._objects(epochs_of), **self._options)
        restored = self._checkpointer.restore()
        if restored:
            trainer._load_callback_state()
        elif trainer.state.global_step:  # Trainer's own checkpoint, of a job that has none of ours yet
            taken = trainer.state.global_step * self._global_batch
            epochs_of.loader.load_state_dict({**epochs_of.loader.state_dict(), "position": taken})
        step = trainer.state.global_step
        trainer.state.epoch = step / steps_in_epoch
        epochs_of.begin(step)
        if step >= max_steps:  # a finished run: Trainer's loop looks at the limit behind a step only
            return epochs, 1
        # not 0 where random generators are ours: Trainer would load those of its own checkpoint over them
        return step // steps_in_epoch, 1 if restored else 0

    def prepared_before(self, *_: Any, **__: Any) -> Any:
        """What `init_training_state` prepared: Trainer asks right behind it."""
        return self._prepared

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Trainer's own, with the loss weighted where shares are uneven."""
        assert self._epochs is not None
        self._weight = self._epochs.weights.popleft()
        if self._weight == 0.0 and "labels" in inputs:  # a filler: its labels count for nobody
            inputs = {**inputs, "labels": torch.full_like(inputs["labels"], _IGNORED_LABEL)}
        try:
            loss: torch.Tensor = self._own["training_step"](model, inputs, num_items_in_batch)
        finally:
            self._weight = None
        self._loss = loss if self._loss is None else self._loss + loss
        return loss

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """Trainer's own times the share's weight.

        A mean over the tokens of all ranks needs none.
        """
        found = self._own["compute_loss"](model, inputs, *given, **named)
        by_tokens = named.get("num_items_in_batch") is not None and self._trainer.args.average_tokens_across_devices
        if self._weight is None or self._weight == 1.0 or by_tokens:
            return found
        return (found[0] * self._weight, *found[1:]) if isinstance(found, tuple) else found * self._weight

    def step_ends(self) -> None:
        """Reports and saves the step, before Trainer logs and evaluates it."""
        assert self._checkpointer is not None, "a step follows the loop's begin"
        assert self._epochs is not None
        state, loss = self._trainer.state, self._loss
        state.epoch = state.global_step / self._epochs.steps
        self._loss = None
        self._checkpointer.step(None if loss is None else self._trainer.accelerator.reduce(loss, "mean"))

    def wait_for_staging(self) -> None:
        """Lets the last save finish its copies: what follows may exchange weights."""
        if self._checkpointer is not None:
            self._checkpointer.wait_for_staging()

    def close(self) -> None:
        """Saves the last step and waits until it is where it belongs."""
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
    """Gives Trainer epochs of whole steps, and the weight of each batch.

    Args:
        loader: endless.
        steps: optimizer steps of an epoch.
        accumulated: batches of a step.
    """

    def __init__(self, loader: ElasticLoader, steps: int, accumulated: int) -> None:
        self.loader, self.steps, self._accumulated = loader, steps, accumulated
        self.weights: deque[float] = deque(maxlen=accumulated)
        self._left = steps

    def begin(self, step: int) -> None:
        """Makes the next iterator end with the epoch in which `step` stands."""
        self._left = self.steps - step % self.steps

    def __len__(self) -> int:
        return self.steps * self._accumulated

    def __iter__(self) -> Iterator[Any]:
        left, self._left = self._left * self._accumulated, self.steps
        for batch in islice(self.loader, left):
            self.weights.append(batch.weight)
            yield batch.data


class _SharedState:
    """Saves what is alike on all ranks of Trainer's own state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, str]:
        """As one text: a log's values are whatever JSON has."""
        state = self._trainer.state
        kept = {name: getattr(state, name) for name in _SHARED_FIELDS}
        newest = [
            {key: value for key, value in entry.items() if not key.endswith(_OF_ONE_RANK)}
            for entry in state.log_history[-LOG_ENTRIES:]
        ]
        return {"json": json.dumps({**kept, "log_history": newest}, sort_keys=True)}

    def load_state_dict(self, saved: Mapping[str, str]) -> None:
        """Into the state object that callbacks hold."""
        for name, value in json.loads(saved["json"]).items():
            setattr(self._trainer.state, name, value)


class _StepCallback(TrainerCallback):
    """Tells a protected Trainer of each finished step."""

    def __init__(self, protected: _ProtectedTrainer) -> None:
        self._protected = protected

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._protected.step_ends()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._protected.close()
