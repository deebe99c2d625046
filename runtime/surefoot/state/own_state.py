"""Asks modules for state that is neither a parameter, a buffer nor extra state, and gives it back.

A module may override `state_dict` or `_save_to_state_dict` (torchmetrics, bitsandbytes), or register hooks that add keys. After
a restore its load hooks run, as after `load_state_dict`. Hooks of torch's own wrappers rename and gather, and are not called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from surefoot.errors import StateMismatch, StateNotRestorable
from surefoot.state.tensor_building import by_shape

OWN = "~own/"
"""Prefix of a submodule's name, among a module's values, for the keys that it adds to its state_dict."""


class OwnState:
    """The keys that one submodule adds to its state_dict; has the interface of extra state."""

    def __init__(self, path: str, owner: torch.nn.Module, is_whole: bool) -> None:
        """`is_whole`: the addition is made by `state_dict` or a hook, and may concern submodules too."""
        self._path, self._owner, self._is_whole = path, owner, is_whole
        self._is_empty = False

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the added keys; raises StateNotRestorable for a tensor that nothing would take back."""
        if self._is_empty:
            return {}
        added = self._added()
        self._is_empty = self._is_whole and not added
        lost = (
            [key for key, value in added.items() if isinstance(value, torch.Tensor)]
            if not self._is_taken_back()
            else []
        )
        if lost:
            raise StateNotRestorable(
                f"{self._path}: state_dict() has {lost[0]!r}, which is neither a parameter nor a buffer, and"
                f" {type(self._owner).__name__} has nothing that takes it back: register it as a buffer, or give the module"
                " get_extra_state and set_extra_state"
            )
        return added

    def set_extra_state(self, added: Mapping[str, Any]) -> None:
        """Gives the keys back the way `load_state_dict` would."""
        owner: Any = self._owner
        if _has_quantization(owner):
            state = {key.removeprefix("weight."): value for key, value in added.items()}
            owner.weight.quant_state = type(owner.weight.quant_state).from_dict(state, owner.weight.device)
            owner.quant_state = owner.weight.quant_state
        elif self._is_whole and _is_overridden(owner, "load_state_dict"):
            owner.load_state_dict({**_state_dict_of(owner), **added})
        elif self._is_taken_back():
            state = _state_dict_of(owner) if self._is_whole else _local_state_dict(owner)
            load_locally(self._path, owner, {**state, **added}, frozenset(added))
        elif {key: self._added().get(key) for key in added} != dict(added):
            raise StateMismatch(
                f"{self._path}: state_dict() has other values of {sorted(added)} here than when it was saved"
            )

    def _is_taken_back(self) -> bool:
        return (
            has_own_load(self._owner)
            or _has_quantization(self._owner)
            or (self._is_whole and _is_overridden(self._owner, "load_state_dict"))
        )

    def _added(self) -> dict[str, Any]:
        owner = self._owner
        if not self._is_whole:
            return {key: value for key, value in _local_state_dict(owner).items() if key not in _own_names(owner)}
        saved = [*owner.named_parameters(remove_duplicate=False), *owner.named_buffers(remove_duplicate=False)]
        names = {name for name, _ in saved}
        nested = tuple(f"{name}." for name, child in owner.named_modules() if child is not owner and adds_state(child))
        added = {
            key: value
            for key, value in _state_dict_of(owner).items()
            if key not in names and not key.endswith("_extra_state") and not (nested and key.startswith(nested))
        }
        copies = _keys_of_copies(added, [tensor for _, tensor in saved])
        return {key: value for key, value in added.items() if key not in copies}


def own_states(name: str, modules: Iterator[tuple[str, torch.nn.Module]], is_flat: bool) -> dict[str, OwnState]:
    """Returns, by `OWN` and their names, the submodules that may add keys to their state_dict.

    `is_flat`: FSDP1 shards the module, whose state_dict would gather it; only what submodules save by themselves is asked for.
    """
    return {
        f"{OWN}{path}": OwnState(f"{name}.{path}" if path else name, owner, is_whole=_is_whole(owner))
        for path, owner in modules
        if adds_state(owner) and not (is_flat and _is_whole(owner))
    }


def adds_state(owner: torch.nn.Module) -> bool:
    """Returns whether a module overrides or hooks its own state_dict."""
    return _is_whole(owner) or _is_overridden(owner, "_save_to_state_dict")


def has_own_load(owner: torch.nn.Module) -> bool:
    """Returns whether a module overrides or hooks how its own keys are loaded."""
    return _is_overridden(owner, "_load_from_state_dict") or any(
        map(_is_foreign, owner._load_state_dict_pre_hooks.values())
    )


def run_load_hooks(name: str, modules: Mapping[str, torch.nn.Module]) -> None:
    """Runs the submodules' overrides and hooks of a load, with their present state, then the hooks after it."""
    for path, owner in modules.items():
        if has_own_load(owner) and not adds_state(owner):
            load_locally(f"{name}.{path}", owner, _named_state(owner), frozenset())
    for owner in reversed(list(modules.values())):
        for hook in owner._load_state_dict_post_hooks.values():
            if _is_foreign(hook):
                hook(owner, _IncompatibleKeys([], []))


def load_locally(path: str, owner: torch.nn.Module, state: dict[str, Any], required: frozenset[str]) -> None:
    """Has one module load its own keys; raises StateMismatch if it does not take one that is required."""
    missing, unexpected, errors = list[str](), list[str](), list[str]()
    metadata = {"version": owner._version}
    with torch.no_grad():
        owner._load_from_state_dict(dict(state), "", metadata, True, missing, unexpected, errors)
    left = sorted(required.intersection(unexpected))
    if errors or left:
        raise StateMismatch(f"{path} does not load its own state: {'; '.join(errors) or 'it does not take ' + left[0]}")


def _is_whole(owner: torch.nn.Module) -> bool:
    return _is_overridden(owner, "state_dict") or any(map(_is_foreign, owner._state_dict_hooks.values()))


def _is_overridden(owner: torch.nn.Module, method: str) -> bool:
    return _is_foreign(vars(owner).get(method) or getattr(type(owner), method))


def _is_foreign(function: Any) -> bool:
    """Returns whether a function is not torch's own; quantization's modules count as foreign."""
    while (
        inner := getattr(function, "hook", None) or (function.func if isinstance(function, partial) else None)
    ) is not None:
        function = inner
    home = str(getattr(function, "__module__", None) or type(function).__module__)
    return not home.startswith(("torch.", "surefoot.")) or home.startswith("torch.ao.")


def _has_quantization(owner: Any) -> bool:
    """Returns whether a weight has bitsandbytes' quantization state, which only `from_dict` takes back."""
    return hasattr(getattr(getattr(owner, "weight", None), "quant_state", None), "from_dict")


def _own_names(owner: torch.nn.Module) -> set[str]:
    return {*owner._parameters, *owner._buffers, "_extra_state"}


def _local_state_dict(owner: torch.nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    owner._save_to_state_dict(state, "", keep_vars=True)
    return state


def _named_state(owner: torch.nn.Module) -> dict[str, Any]:
    buffers = dict(owner.named_buffers(remove_duplicate=False))
    return {**dict(owner.named_parameters(remove_duplicate=False)), **buffers}


def _state_dict_of(owner: torch.nn.Module) -> dict[str, Any]:
    try:
        return dict(owner.state_dict(keep_vars=True))
    except TypeError:  # an override without torch's arguments
        return dict(owner.state_dict())


def _keys_of_copies(added: Mapping[str, Any], saved: Sequence[torch.Tensor]) -> set[str]:
    """Returns the keys of views and copies of saved tensors: hooks rename, split and convert those."""
    tensors = {key: value for key, value in added.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        return set()
    storages, saved_by_shape = {_storage_address(tensor) for tensor in saved} - {0}, by_shape(saved)
    return {
        key
        for key, value in tensors.items()
        if _storage_address(value) in storages or _is_copy_of_any(value, saved_by_shape.get(value.shape, ()))
    }


def _storage_address(tensor: torch.Tensor) -> int:
    """Returns where a tensor's storage begins; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _is_copy_of_any(value: torch.Tensor, saved: Iterable[torch.Tensor]) -> bool:
    """Returns whether a tensor equals a saved one of its shape, in either one's type."""
    return any(
        torch.equal(tensor, value.to(tensor)) or torch.equal(tensor.to(value), value)
        for tensor in saved
        if type(tensor.detach()) is torch.Tensor
    )
