"""Replaces torchtitan's checkpoint manager.

    config.checkpoint = SurefootCheckpoints.Config(enable=True, interval=50)

torchtitan's own manager saves with collectives on every rank at once, and treats existing metadata as a complete save.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.tools import filesystem

from surefoot.checkpointer import Checkpointer
from surefoot.errors import ConfigurationError

_HONOURED = frozenset(
    {"enable", "folder", "interval", "keep_latest_k", "load_step", "enable_first_step_checkpoint", "reset_on_resize"}
)
_INITIAL_LOAD_ADVICE = "read the weights with Checkpointer.load_weights, or name the job in checkpoint.restoreFrom"
_REJECTED = {
    "initial_load_path": _INITIAL_LOAD_ADVICE,
    "initial_load_model_only": _INITIAL_LOAD_ADVICE,
    "initial_load_in_hf": _INITIAL_LOAD_ADVICE,
    "initial_load_in_hf_quantized": _INITIAL_LOAD_ADVICE,
    "last_save_model_only": "the last checkpoint is a whole one; Checkpointer.load_weights reads its model alone",
    "last_save_in_hf": "`surefoot checkpoints export --as safetensors` writes them afterwards",
    "export_dtype": "`surefoot checkpoints export --as safetensors` writes the model's own precision",
    "exclude_from_loading": "read the weights alone with Checkpointer.load_weights, in a folder of its own",
    "create_seed_checkpoint": "a checkpoint of any world size restores at any other",
    "load_only": "give a folder of its own, from which nothing is restored",
}
_KEEP_ALL = 2**31 - 1


class SurefootCheckpoints(BaseCheckpointManager):
    """Saves model parts, optimizers, schedulers, the loader and the train state.

    Under an agent the job sets the folder and the interval; without one `folder`, `interval` and `keep_latest_k` do.

    Args:
        config: `checkpoint` of the trainer's configuration.
        dataloader: the loader; the state of torchtitan's own is per rank, which ties the job to its world size.
        model_parts: this rank's parts of the model, one for each of its pipeline stages.
        optimizers: a container with one optimizer per part.
        lr_schedulers: a container with one scheduler per part.
        states: further objects by name; torchtitan passes `train_state`.
        sd_adapter: not used.
        base_folder: parent of `folder`.

    Raises:
        ConfigurationError: an option is not supported; the message names the alternative.
    """

    save_future: Future[Any] | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options, and those of Checkpointer."""

        reset_on_resize: tuple[str, ...] = field(default=())
        """Names of objects that may be reset when the world size changes, such as `loader`."""

        last_save_model_only: bool = False
        """Rejected if set: the last checkpoint is a full one, so that more steps may follow."""

        initial_load_model_only: bool = False
        """Has no effect, since `initial_load_path` is rejected."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self._checkpointer: Checkpointer | None = None
        if not self.enable:
            return
        _refuse_others(config)
        self._saves_first_step = config.enable_first_step_checkpoint
        objects = _numbered_names("model", model_parts) | _numbered_names("optimizer", list(optimizers))
        objects |= _numbered_names("lr_scheduler", list(lr_schedulers))
        self._checkpointer = Checkpointer(
            reset_on_resize=config.reset_on_resize,
            folder=filesystem.join(base_folder, config.folder),
            interval_steps=config.interval,
            keep=config.keep_latest_k or _KEEP_ALL,
            loader=dataloader,
            **objects,
            **states,
        )

    def _load(self, step: int = -1) -> bool:
        if step != -1:
            raise ConfigurationError(
                f"checkpoint.load_step={step}: the newest complete checkpoint is restored; `surefoot rollback` makes a job"
                " that begins at another step"
            )
        return self._enabled_checkpointer.restore() > 0

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        counted_step = self._enabled_checkpointer.step()
        if counted_step != curr_step:
            raise ConfigurationError(
                f"torchtitan saves step {curr_step}, and Surefoot counted {counted_step}: load() first"
            )
        return (
            self._enabled_checkpointer.save_now() if last_step or (curr_step == 1 and self._saves_first_step) else True
        )

    def _maybe_wait_for_staging(self) -> None:
        self._enabled_checkpointer.wait_for_staging()

    def _wait_for_saving(self) -> None:
        """Does nothing: a save is complete once all its parts are, without anyone waiting."""

    def _close(self) -> None:
        self._enabled_checkpointer.close()

    @property
    def _enabled_checkpointer(self) -> Checkpointer:
        assert self._checkpointer is not None, "torchtitan calls these where checkpoints are enabled"
        return self._checkpointer


def _refuse_others(config: SurefootCheckpoints.Config) -> None:
    """Raises ConfigurationError for a set but unsupported option, also for one of a later torchtitan."""
    defaults = type(config)()
    for option in fields(config):
        name = option.name
        if name not in _HONOURED and getattr(config, name) != getattr(defaults, name):
            advice = _REJECTED.get(name, "leave it at its default")
            raise ConfigurationError(f"checkpoint.{name} has no meaning with SurefootCheckpoints: {advice}")


def _numbered_names(name: str, objects: list[Any]) -> dict[str, Any]:
    return {name if index == 0 else f"{name}{index + 1}": element for index, element in enumerate(objects)}
