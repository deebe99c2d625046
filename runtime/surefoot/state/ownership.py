"""Decides whether an object's state is shared or each rank's own.

Used by `program`. A loader that is not elastic holds a rank's place in that rank's share of the data. Given to another
rank, or divided among another number of them, samples are lost and repeated without a word: so it returns to its own
rank, and a world of another size is refused unless the object says how its states are divided, or the script that it
may begin anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from surefoot.errors import StateNotRestorable
from surefoot.format.digests import digest
from surefoot.state.entries import dtype_name, dtype_named, is_dtensor

Whose = Literal["all", "own", "divided"]
"""Every rank has the same (checked by digest); each its own; each its own, and the object can divide them anew."""

INLINE_BYTES = 65536
"""Tensors up to this are saved among an object's plain values, where they are each rank's own."""

_TENSOR = "\x00tensor of a rank"


def whose_state(name: str, subject: Any) -> Whose:
    """Classifies an object's state as shared, divided, or each rank's own.

    `loader`, and whatever is iterated over and does not say that it is elastic, is each rank's own.
    """
    if callable(getattr(subject, "load_state_dicts", None)):
        return "divided"
    iterated = hasattr(type(subject), "__iter__") and not isinstance(subject, Mapping)
    return "own" if (iterated or name == "loader") and not getattr(subject, "elastic", False) else "all"


@dataclass(frozen=True, slots=True)
class Inlined:
    """Moves an object's small tensors into its plain values.

    Each rank has its own of them: all of a loader's, and of other objects the states of generators (one-dimensional
    bytes). Small tensors of an EMA are shared by all ranks, and stay tensors.
    """

    subject: Any
    whose: Whose

    def state_dict(self) -> Any:
        try:
            state = self.subject.state_dict()
        except AttributeError as error:
            if self.whose == "all":
                raise
            raise StateNotRestorable(
                f"a {type(self.subject).__name__} has state_dict and cannot give its state ({error}). A loader that"
                " Accelerate prepared needs DataLoaderConfiguration(use_stateful_dataloader=True)"
            ) from error
        return _inlined(state, self.whose)

    def own_parts(self, name: str, own: Mapping[str, Any], first: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns what a rank gets back: its own parts.

        This object's keys in `told_once` are the first rank's: a thousand ranks would else save as many copies of
        what is alike for all.
        """
        once = getattr(self.subject, "told_once", ()) if self.whose == "divided" else ()
        if not once or name not in own or name not in first:
            return own
        return {name: {**own[name], **{key: first[name][key] for key in once if key in first[name]}}}

    def load_state_dict(self, state: Any) -> None:
        self.subject.load_state_dict(_restored(state))

    def load_state_dicts(self, states: Sequence[Any], rank: int, world: int) -> None:
        self.subject.load_state_dicts([_restored(state) for state in states], rank, world)


def value_digest(encoded: bytes) -> str:
    """Digests an object's values, independent of the order of their keys."""
    return digest(json.dumps(json.loads(encoded), sort_keys=True).encode())


def _inlined(tree: Any, whose: Whose) -> Any:
    if isinstance(tree, torch.Tensor):
        return _said(tree) if _is_small(tree, whose) else tree
    if type(tree) is dict and set(tree) == {_TENSOR}:
        return {_TENSOR: [_inlined(tree[_TENSOR], whose)]}  # a program's own key of that name
    return _mapped(tree, whose)


def _mapped(tree: Any, whose: Whose) -> Any:
    if isinstance(tree, dict):
        items: Iterator[tuple[Any, Any]] = ((key, _inlined(value, whose)) for key, value in tree.items())
        return dict(items) if type(tree) is dict else _like(tree, items)
    if type(tree) in (list, tuple):
        return type(tree)(_inlined(value, whose) for value in tree)
    return tree


def _like(tree: Any, items: Iterator[tuple[Any, Any]]) -> Any:
    """A copy of a subclass of dict, of its own kind: what it is besides (a default factory, an order) stays."""
    made = tree.copy()
    for key, value in items:
        made[key] = value
    return made


def _is_small(tensor: torch.Tensor, whose: Whose) -> bool:
    if is_dtensor(tensor) or type(tensor) is not torch.Tensor or tensor.device.type == "meta":
        return False
    if tensor.layout != torch.strided or tensor.is_quantized:
        return False
    if whose != "divided" and tensor.numel() * tensor.element_size() > INLINE_BYTES:
        return False  # of one that is divided every rank gets all states, with all their tensors
    return whose != "all" or (tensor.dtype == torch.uint8 and tensor.dim() == 1)


def _said(tensor: torch.Tensor) -> dict[str, Any]:
    host = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    raw = host.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {_TENSOR: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "of": raw}}


def _restored(tree: Any) -> Any:
    if type(tree) is dict and set(tree) == {_TENSOR}:
        said = tree[_TENSOR]
        if isinstance(said, list):
            return {_TENSOR: _restored(said[0])}
        raw = (
            torch.frombuffer(bytearray(said["of"]), dtype=torch.uint8)
            if said["of"]
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        return raw.view(dtype_named(said["dtype"])).reshape(said["shape"])
    if isinstance(tree, dict):
        items = ((key, _restored(value)) for key, value in tree.items())
        return dict(items) if type(tree) is dict else _like(tree, items)
    if type(tree) in (list, tuple):
        return type(tree)(_restored(value) for value in tree)
    return tree
