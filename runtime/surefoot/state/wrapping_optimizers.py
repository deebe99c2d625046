"""Finds the optimizers that an optimizer keeps, and tensors of it that no state has. Used by `optimizers` and `program`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from surefoot.errors import StateNotRestorable
from surefoot.staging.host_copies import PLAIN_CLASSES
from surefoot.state.tensor_building import extract_tensors, marks


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
    if unknown := first_unknown(attributes, name, known_tensors(optimizer)):
        raise StateNotRestorable(
            f"{unknown} is a tensor of a {type(optimizer).__name__} around another optimizer, and no optimizer's state has"
            " it: keep it in the state of the parameter that it belongs to"
        )


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    return getattr(optimizer, "state", None)


def known_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Lists parameters and state tensors of an optimizer and of those that it keeps."""
    tensors: dict[str, torch.Tensor] = {}
    for number, state in enumerate((state_of(optimizer) or {}).values()):
        extract_tensors(state, str(number), tensors)
    known = [*tensors.values(), *chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    for _, kept in kept_objects(optimizer):
        known += known_tensors(kept) if isinstance(kept, torch.optim.Optimizer) else []
    return known


def first_unknown(tree: Any, path: str, known: Sequence[torch.Tensor]) -> str | None:
    """Returns the path of the first tensor in a tree that is none of the known ones, nor equal to one."""
    tensors: dict[str, torch.Tensor] = {}
    extract_tensors(tree, path, tensors)
    places = {(t.data_ptr(), t.shape) for t in known if type(t) in PLAIN_CLASSES}
    known_ids = {id(t) for t in known}
    for name, tensor in tensors.items():
        if id(tensor) in known_ids or type(tensor) not in PLAIN_CLASSES or (tensor.data_ptr(), tensor.shape) in places:
            continue
        if not any(t.shape == tensor.shape and torch.equal(t, tensor.to(t)) for t in known if type(t) in PLAIN_CLASSES):
            return name
    return None


_CONTAINERS = (list, tuple, dict)


def _has_only_tensors(value: Any) -> bool:
    """Returns whether a container has tensors of more than one element, at any depth, and nothing else."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 1
    children = list(value.values() if isinstance(value, dict) else value) if isinstance(value, _CONTAINERS) else []
    return bool(children) and all(map(_has_only_tensors, children))


def is_inner(value: Any, known: Sequence[torch.Tensor]) -> bool:
    """Returns whether a value of a state_dict is an inner optimizer's: it has tensors, and all of them are known."""
    return bool(marks(extract_tensors(value, "", {}))) and first_unknown(value, "", known) is None


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
