"""Everything that an object holds, flat and by name, as plain tensors and values that can be compared and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

PLAIN = (bool, int, float, str, bytes, type(None))


def picture_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Of optimizers by the order of parameters, as an optimizer numbers them itself; sharded tensors are gathered."""
    found: dict[str, Any] = {}
    for name, subject in objects.items():
        if isinstance(subject, torch.nn.Module):
            tensors = {**dict(subject.named_parameters()), **dict(subject.named_buffers())}
            found.update(_leaves(name, tensors))
        elif isinstance(subject, torch.optim.Optimizer):
            found.update(_leaves(name, _of_optimizer(subject)))
        else:
            found.update(_leaves(name, subject.state_dict()))
    return found


def _of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {id(p): n for n, p in enumerate(parameters)}
    state = {numbers.get(id(key), str(key)): value for key, value in optimizer.state.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"state": state, "groups": groups}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(path, value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{path}/{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(f"{path}/{number}", inner)
    elif isinstance(value, PLAIN):
        yield path, value
    elif not callable(value):
        yield path, repr(value)


def _of_tensor(path: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        for inner in tensor.__tensor_flatten__()[0]:
            yield from _of_tensor(f"{path}:{inner}", getattr(tensor, inner))
        return
    yield path, tensor.detach().to_dense().clone() if tensor.is_sparse else tensor.detach().clone()
