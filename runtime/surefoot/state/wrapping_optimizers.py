"""Finds the optimizers that an optimizer keeps, and tensors of it that no state has. Used by `optimizers` and `program`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from surefoot.errors import StateNotRestorable
from surefoot.staging.host_copies import PLAIN_CLASSES
from surefoot.state.tensor_building import by_shape, extract_tensors, marks


def kept_objects(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yields (attribute, object) of the optimizers, schedulers and scalers that an optimizer has in its attributes.

    Lookahead, SAM and their like step another optimizer, whose state is not in theirs.
    """
    if partitioned(optimizer)[1] is not None:
        return
    for attribute, value in vars(optimizer).items():
        if attribute in _APART:
            continue
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        for name, kept in [(attribute, value), *((f"{attribute}.{key}", item) for key, item in items)]:
            is_same = isinstance(kept, torch.optim.Optimizer) and state_of(kept) is state_of(optimizer)
            if isinstance(kept, _KEPT) and kept is not optimizer and not is_same:
                yield name, kept


_APART = ("state", "param_groups", "defaults")
_KEPT = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


def keeps_optimizers(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer is around another one."""
    return any(isinstance(kept, torch.optim.Optimizer) for _, kept in kept_objects(optimizer))


def own_numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the plain numbers among a wrapping optimizer's attributes: a Lookahead may count its steps there."""
    items = vars(optimizer).items() if keeps_optimizers(optimizer) else ()
    return {k: v for k, v in items if type(v) in (int, float, bool)}


def reject_lost_tensors(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises StateNotRestorable for tensors that a wrapping optimizer has in an attribute, and no state has."""
    if not keeps_optimizers(optimizer):
        return
    attributes = {k: v for k, v in vars(optimizer).items() if k not in _APART and isinstance(v, _CONTAINERS)}
    attributes = {k: v for k, v in attributes.items() if _has_only_tensors(v)}
    if unknown := KnownTensors(optimizer).first_unknown(attributes, name):
        raise StateNotRestorable(
            f"{unknown} is a tensor of a {type(optimizer).__name__} around another optimizer, and no optimizer's state has"
            " it: keep it in the state of the parameter that it belongs to"
        )


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    return getattr(optimizer, "state", None)


class KnownTensors:
    """Parameters and state tensors of an optimizer and of those that it keeps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        tensors = list(_tensors_of(optimizer))
        plain = [tensor for tensor in tensors if type(tensor) in PLAIN_CLASSES]
        self._tensors = tensors  # kept alive, so that an id stays that of one tensor
        self._ids = {id(tensor) for tensor in tensors}
        self._places = {(tensor.data_ptr(), tensor.shape) for tensor in plain}
        self._by_shape = by_shape(plain)

    def first_unknown(self, tree: Any, path: str) -> str | None:
        """Returns the path of the first tensor in a tree that is none of these, nor equal to one."""
        tensors: dict[str, torch.Tensor] = {}
        extract_tensors(tree, path, tensors)
        return next((name for name, tensor in tensors.items() if not self._has(tensor)), None)

    def has_all_of(self, value: Any) -> bool:
        """Returns whether a value of a state_dict has tensors, and all of them are known: an inner optimizer's."""
        return bool(marks(extract_tensors(value, "", {}))) and self.first_unknown(value, "") is None

    def _has(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self._ids or type(tensor) not in PLAIN_CLASSES:
            return True
        same_shape = self._by_shape.get(tensor.shape, ())
        return (tensor.data_ptr(), tensor.shape) in self._places or any(
            torch.equal(t, tensor.to(t)) for t in same_shape
        )


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for number, state in enumerate((state_of(optimizer) or {}).values()):
        extract_tensors(state, str(number), tensors)
    yield from tensors.values()
    yield from chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for _, kept in kept_objects(optimizer):
        if isinstance(kept, torch.optim.Optimizer):
            yield from _tensors_of(kept)


_CONTAINERS = (list, tuple, dict)


def _has_only_tensors(value: Any) -> bool:
    """Returns whether a container has tensors of more than one element, at any depth, and nothing else."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 1
    children = list(value.values() if isinstance(value, dict) else value) if isinstance(value, _CONTAINERS) else []
    return bool(children) and all(map(_has_only_tensors, children))


def partitioned(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, frozenset[int] | None]:
    """Returns the optimizer that has the state, and the ids of this rank's parameters (None: all).

    torch's ZeroRedundancyOptimizer gives each rank the state of some parameters.
    """
    rank_by_parameter: Any = getattr(optimizer, "_param_to_rank", None)
    inner = getattr(optimizer, "optim", None)
    if rank_by_parameter is None or not isinstance(inner, torch.optim.Optimizer):
        return optimizer, None
    own_rank = optimizer.rank  # type: ignore[attr-defined]  # ZeroRedundancyOptimizer's
    return inner, frozenset(id(p) for p, rank in rank_by_parameter.items() if rank == own_rank)
