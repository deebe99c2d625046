"""Saves any object with `state_dict` and `load_state_dict`.

Examples are a scheduler, a loader, EMA, a scaler, or a user's class. The object's tensors are treated as replicas and
saved by the lowest rank, unless each rank has its own (`classify_state`). Used by `program`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from surefoot.errors import ConfigurationError, StateNotRestorable
from surefoot.format.layouts import digest
from surefoot.format.values import TAG, Inner, decode_values, encode_values, has_only_scalars
from surefoot.geometry.sharding import Grid
from surefoot.state.entries import Entry, SavedTensor, dtype_from_name, dtype_name, is_dtensor
from surefoot.state.tensor_building import (
    BuildLocation,
    Facts,
    TensorPlaceholder,
    build,
    built_marks,
    extract_tensors,
    facts_of,
    first_difference,
    has_named_objects,
    insert_tensors,
    marks,
)
from surefoot.state.tensor_locations import EntryPlacer, Replicas

# ---- random number generators ----------------------------------------------------------------------------------------
# Captures the generators of python, numpy, torch and CUDA as values. They are restored on the same rank if the world
# size is unchanged. At another size they are seeded from (seed, rank, step), so that no two ranks draw the same numbers
# and a restart is reproducible.


def capture_generators() -> dict[str, Any]:
    """Returns the state of every generator that this process has."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": array("I", words).tobytes(), "gauss": gauss},
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {"name": name, "keys": keys, "at": [int(position), int(has_gauss), float(cached)]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it so
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """Sets the generators; those that this process lacks are skipped."""
    python = state["python"]
    random.setstate((python["version"], tuple(array("I", python["words"])), python["gauss"]))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy_state = state["numpy"]
        numpy.random.set_state((numpy_state["name"], numpy_state["keys"], *numpy_state["at"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))


def seed_generators(seed: int, rank: int, step: int) -> None:
    """Seeds every generator from values that do not depend on the world size."""
    seed_digest = hashlib.blake2b(f"{seed}:{rank}:{step}".encode(), digest_size=8).digest()
    derived_seed = int.from_bytes(seed_digest, "little") >> 1
    random.seed(derived_seed)
    torch.manual_seed(derived_seed)  # CUDA's too, also before CUDA is initialised
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(derived_seed & 0xFFFFFFFF)


# ---- plain values ----------------------------------------------------------------------------------------------------
# Encodes a rank's plain values, including torch's small types, as bytes. Called by `program`. Decoding never executes
# saved code.

_ATTRIBUTES = {kind.__name__: kind for kind in (torch.memory_format, torch.layout, torch.qscheme)}
"""Types by name whose values are attributes of torch, such as `torch.channels_last`."""


def values_blob(values: Mapping[str, Any]) -> bytes:
    """Encodes a rank's values with the state of the random generators.

    `random` among the values, if present, replaces the generators' current state.
    """
    return encoded({**values, "random": values.get("random") or capture_generators()})


def encoded(values: Mapping[str, Any]) -> bytes:
    return encode_values(values, _encode_known_type)


def read_values(blob: bytes) -> dict[str, Any]:
    """Decodes what `values_blob` encoded."""
    return decode_values(blob, _decode_known_type)


def _encode_known_type(value: Any, inner: Inner) -> dict[str, Any] | None:
    kind = type(value)
    if kind is TensorPlaceholder:
        return {TAG: "tensor", "of": value.name} | ({} if value.facts is None else {"facts": inner(dict(value.facts))})
    if kind is torch.Size:
        return {TAG: "torch.Size", "of": list(value)}
    if kind is torch.dtype:
        return {TAG: "torch.dtype", "of": dtype_name(value)}
    if kind is torch.device:
        return {TAG: "torch.device", "of": str(value)}
    if kind.__name__ in _ATTRIBUTES and kind is _ATTRIBUTES[kind.__name__]:
        return {TAG: f"torch.{kind.__name__}", "of": str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.dtype) and not value.hasobject and value.names is None:
        return {TAG: "numpy.dtype", "of": value.str}
    return None


def _decode_known_type(tag: str, fields: Mapping[str, Any], inner: Inner) -> Any:
    """Decodes one tagged value; raises KeyError for an unknown tag."""
    content = fields["of"]
    match tag:
        case "tensor":
            return TensorPlaceholder(str(content), inner(fields["facts"]) if "facts" in fields else None)
        case "torch.Size":
            return torch.Size(content)
        case "torch.dtype":
            return dtype_from_name(str(content))
        case "torch.device":
            return torch.device(str(content))
        case "numpy.dtype":
            import numpy  # only where such a value was saved

            return numpy.dtype(str(content))
    kind = _ATTRIBUTES[tag.removeprefix("torch.")]
    attribute = getattr(torch, str(content), None)
    if not isinstance(attribute, kind):
        raise ValueError(f"torch has no {tag} {content}")
    return attribute


# ---- which rank saves an object --------------------------------------------------------------------------------------
# Decides whether an object's state is shared or each rank's own. The state of a loader that is not elastic is a rank's
# position in that rank's share of the data. Restored on another rank or at another world size, it would silently lose
# and repeat samples. So it returns to its own rank, and another world size is rejected unless the object can divide its
# states or the script allows a reset.

Whose = Literal["all", "own", "divided"]
"""All ranks have the same state (checked by digest); each its own; each its own, and the object can divide them."""

INLINE_BYTES = 65536
"""Largest per-rank tensor that is saved among an object's plain values, in bytes."""

_TENSOR = "\x00tensor of a rank"


def classify_state(name: str, subject: Any) -> Whose:
    """Classifies an object's state as shared, divided, or each rank's own.

    An object named `loader`, or any iterable without a true attribute `elastic`, is each rank's own.
    """
    if callable(getattr(subject, "load_state_dicts", None)):
        return "divided"
    iterated = hasattr(type(subject), "__iter__") and not isinstance(subject, Mapping)
    return "own" if (iterated or name == "loader") and not getattr(subject, "elastic", False) else "all"


@dataclass(frozen=True, slots=True)
class InlinedTensors:
    """Moves an object's small tensors into its plain values.

    These tensors differ between ranks: all tensors of a loader, and the generator states of other objects
    (one-dimensional uint8). Small tensors of an EMA are the same on all ranks and stay tensors.
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
        return _inline_tensors(state, self.whose)

    def own_parts(self, name: str, own: Mapping[str, Any], first: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the values that a rank gets back: its own, with shared keys from the first rank.

        Only the first rank saves the keys in the object's `shared_state_keys`; otherwise a thousand ranks would save as
        many copies of the same values.
        """
        shared_keys = getattr(self.subject, "shared_state_keys", ()) if self.whose == "divided" else ()
        if not shared_keys or name not in own or name not in first:
            return own
        return {name: {**own[name], **{key: first[name][key] for key in shared_keys if key in first[name]}}}

    def load_state_dict(self, state: Any) -> None:
        self.subject.load_state_dict(_restore_tensors(state))

    def load_state_dicts(self, states: Sequence[Any], rank: int, world_size: int) -> None:
        self.subject.load_state_dicts([_restore_tensors(state) for state in states], rank, world_size)


def value_digest(encoded: bytes) -> str:
    """Digests an object's values, independent of the order of their keys."""
    return digest(json.dumps(json.loads(encoded), sort_keys=True).encode())


def _inline_tensors(tree: Any, whose: Whose) -> Any:
    if isinstance(tree, torch.Tensor):
        return _encode_tensor(tree) if _is_small(tree, whose) else tree
    if type(tree) is dict and set(tree) == {_TENSOR}:
        return {_TENSOR: [_inline_tensors(tree[_TENSOR], whose)]}  # a program's own key of that name
    return _inline_children(tree, whose)


def _inline_children(tree: Any, whose: Whose) -> Any:
    if has_only_scalars(tree):
        return type(tree)(tree)
    if isinstance(tree, dict):
        items: Iterator[tuple[Any, Any]] = ((key, _inline_tensors(value, whose)) for key, value in tree.items())
        return dict(items) if type(tree) is dict else _copy_with_items(tree, items)
    if type(tree) in (list, tuple):
        return type(tree)(_inline_tensors(value, whose) for value in tree)
    return tree


def _copy_with_items(tree: Any, items: Iterator[tuple[Any, Any]]) -> Any:
    """Copies a subclass of dict with other values, which keeps its default factory or order."""
    copy = tree.copy()
    for key, value in items:
        copy[key] = value
    return copy


def _is_small(tensor: torch.Tensor, whose: Whose) -> bool:
    if is_dtensor(tensor) or type(tensor) is not torch.Tensor or tensor.device.type == "meta":
        return False
    if tensor.layout != torch.strided or tensor.is_quantized:
        return False
    if whose != "divided" and tensor.numel() * tensor.element_size() > INLINE_BYTES:
        return False  # of one that is divided every rank gets all states, with all their tensors
    return whose != "all" or (tensor.dtype == torch.uint8 and tensor.dim() == 1)


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    host = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    raw = host.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {_TENSOR: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "of": raw}}


def _restore_tensors(tree: Any) -> Any:
    if has_only_scalars(tree):
        return tree
    if type(tree) is dict and set(tree) == {_TENSOR}:
        encoded_tensor = tree[_TENSOR]
        if isinstance(encoded_tensor, list):
            return {_TENSOR: _restore_tensors(encoded_tensor[0])}
        raw_bytes = (
            torch.frombuffer(bytearray(encoded_tensor["of"]), dtype=torch.uint8)
            if encoded_tensor["of"]
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        return raw_bytes.view(dtype_from_name(encoded_tensor["dtype"])).reshape(encoded_tensor["shape"])
    if isinstance(tree, dict):
        items = ((key, _restore_tensors(value)) for key, value in tree.items())
        return dict(items) if type(tree) is dict else _copy_with_items(tree, items)
    if type(tree) in (list, tuple):
        return type(tree)(_restore_tensors(value) for value in tree)
    return tree


# ---- objects ---------------------------------------------------------------------------------------------------------


class ObjectPart:
    """Saves one named object, copying its state eagerly.

    Nothing signals when an object changes its state, so it cannot be copied later.
    """

    def __init__(
        self,
        name: str,
        subject: Any,
        rank_and_world_size: tuple[int, int],
        replicas: Replicas,
        state_source: InlinedTensors | None = None,
    ) -> None:
        """Checks the object; `state_source` is asked for its state in place of the object itself."""
        if not (callable(getattr(subject, "state_dict", None)) and callable(getattr(subject, "load_state_dict", None))):
            raise ConfigurationError(
                f"{name} is a {type(subject).__name__} without state_dict and load_state_dict, so it cannot be saved:"
                f" {_way_out(name, subject)}"
            )
        self.name, self._subject = name, state_source or subject
        rank, world_size = rank_and_world_size
        replicas = replicas.of_objects()
        default = replicas.of(name) or Grid.world_size(world_size)
        self.is_on_every_rank = default.count == world_size
        self._placer = EntryPlacer(rank, default, replicas)
        self._incoming: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        """Drops cached entries."""
        self._placer.forget()

    def entries(self) -> Iterator[Entry]:
        for name, tensor in self._extract_state()[1].items():
            yield from self._placer.of(name, tensor, "lowest")

    def values(self) -> Any:
        return self._extract_state()[0]

    def prepare(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds a tensor for each saved one.

        It is like the object's own tensor if there is one, else as it was saved. `state_dict` is not called on an
        object without saved tensors: torchdata's nodes start to iterate then, and ignore a state loaded afterwards.
        """
        placeholders = list(marks(values))
        live = self._extract_state()[1] if placeholders else {}
        self._incoming = {}
        for placeholder in placeholders:
            live_tensor = live.get(placeholder.name)
            if live_tensor is not None and (
                is_dtensor(live_tensor) or _has_saved_shape(live_tensor, placeholder, saved)
            ):
                self._incoming[placeholder.name] = torch.empty_like(live_tensor)
            elif (
                tensor := build(placeholder.name, placeholder.facts, saved, BuildLocation(self._placer.rank))
            ) is not None:
                self._incoming[placeholder.name] = tensor

    def check_restorable(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds the restored state aside and compares all but DTensors."""
        state = self._subject.state_dict()
        scratch = built_marks(values, saved, BuildLocation(self._placer.rank, scratch=True))
        scratch |= {name: tensor for name, tensor in self._extract_state(state)[1].items() if is_dtensor(tensor)}
        restored = insert_tensors(values, scratch.__getitem__, state, self.name)
        if difference := first_difference(restored, state, self.name):
            raise StateNotRestorable(f"{difference} by a restore: give it as tensors, numbers and text in state_dict")

    def targets(self) -> Iterator[Entry]:
        for name, tensor in self._incoming.items():
            yield from self._placer.of(name, tensor, "lowest")

    def apply(self, values: Any) -> None:
        live = self._subject.state_dict() if has_named_objects(values) else None
        self._subject.load_state_dict(insert_tensors(values, self._incoming.__getitem__, live, self.name))
        self._incoming = {}

    def _extract_state(self, tree: Any = None) -> tuple[Any, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        tree = self._subject.state_dict() if tree is None else tree
        return extract_tensors(tree, self.name, tensors, self._facts_of), tensors

    def _facts_of(self, tensor: torch.Tensor) -> Facts | None:
        """Describes a tensor; None for a DTensor, which is only built like the object's own."""
        return None if is_dtensor(tensor) else facts_of(self.name, tensor)


def _way_out(name: str, subject: Any) -> str:
    """Returns how a state can be given that the user meant to give by this object."""
    if isinstance(subject, torch.nn.Parameter):
        return f"give it in a list, {name}=torch.nn.ParameterList([parameter])"
    if isinstance(subject, torch.Tensor):
        return "register it as a buffer of a module, and give that module"
    if isinstance(subject, Mapping) and any(isinstance(value, torch.Tensor) for value in subject.values()):
        return f"it seems to be a state_dict() itself; give the object that it is of, {name}=model"
    if isinstance(subject, list | tuple) and any(isinstance(item, torch.nn.Module) for item in subject):
        return f"give each module a name of its own, or {name}=torch.nn.ModuleList(modules)"
    if isinstance(subject, list | tuple) and any(hasattr(item, "state_dict") for item in subject):
        return f"give each object a name of its own, {name}1=…, {name}2=…"
    if hasattr(subject, "__iter__") and not isinstance(subject, Mapping | list | tuple | set | str | bytes):
        return "a loader needs them to continue where it was; surefoot.ElasticLoader has them"
    if isinstance(subject, Mapping | list | tuple | int | float | str | bool):
        return f"give plain values in one dict, values={{{name!r}: …}}, which restore() updates"
    return f"give an object of a class of yours that has both, and keeps the {type(subject).__name__}"


def _has_saved_shape(
    live_tensor: torch.Tensor, placeholder: TensorPlaceholder, saved: Mapping[str, SavedTensor]
) -> bool:
    """Returns whether the saved tensor is plain and has the shape of the object's own."""
    plain = placeholder.facts is None or set(placeholder.facts) == {"device"}
    return plain and placeholder.name in saved and tuple(live_tensor.shape) == saved[placeholder.name].shape
