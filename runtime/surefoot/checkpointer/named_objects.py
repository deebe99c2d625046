"""Validates and unwraps the objects that are named to a Checkpointer.

Called by `checkpointer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Protocol

import torch

from surefoot.errors import ConfigurationError


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
        found[name] = _unwrap(name, subject)
    return found


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
