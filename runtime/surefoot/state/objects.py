"""Saves any object with `state_dict` and `load_state_dict`.

A scheduler, a loader, EMA, a scaler, or the user's own. Its tensors are taken for replicas and saved by the lowest
rank, unless they are each rank's own (`objects`). Used by `program`.
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
from surefoot.format.values import TAG, Inner, decode_values, encode_values
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
# Captures the generators of python, numpy, torch and CUDA as values. They return to the same rank of a world of the
# same size; any other world seeds them from (seed, rank, step), so that no two ranks draw alike and a restart is
# reproducible.


def capture_generators() -> dict[str, Any]:
    """State of every generator that this process has."""
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
        kept = state["numpy"]
        numpy.random.set_state((kept["name"], kept["keys"], *kept["at"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))


def seed_generators(seed: int, rank: int, step: int) -> None:
    """Seeds every generator from what is known in any world."""
    digest = hashlib.blake2b(f"{seed}:{rank}:{step}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    random.seed(number)
    torch.manual_seed(number)  # CUDA's too, also before CUDA is initialised
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


# ---- plain values ----------------------------------------------------------------------------------------------------
# Encodes a rank's plain values with torch's small types, as bytes. Called by `program`; nothing that was saved is ever
# run.

_ATTRIBUTES = {kind.__name__: kind for kind in (torch.memory_format, torch.layout, torch.qscheme)}
"""Kinds whose few values are attributes of torch, by the name that they print."""


def values_blob(body: Mapping[str, Any]) -> bytes:
    """Encodes a rank's values with the state of the random generators.

    `random` in the body, if it is there, goes before the generators' present state.
    """
    return encoded({**body, "random": body.get("random") or capture_generators()})


def encoded(body: Mapping[str, Any]) -> bytes:
    return encode_values(body, _encode_known_type)


def read_values(blob: bytes) -> dict[str, Any]:
    """Decodes what `values_blob` encoded."""
    return decode_values(blob, _read)


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


def _read(tag: str, body: Mapping[str, Any], inner: Inner) -> Any:
    """Raises KeyError for a kind that is none of these."""
    of = body["of"]
    match tag:
        case "tensor":
            return TensorPlaceholder(str(of), inner(body["facts"]) if "facts" in body else None)
        case "torch.Size":
            return torch.Size(of)
        case "torch.dtype":
            return dtype_from_name(str(of))
        case "torch.device":
            return torch.device(str(of))
        case "numpy.dtype":
            import numpy  # only where such a value was saved

            return numpy.dtype(str(of))
    kind = _ATTRIBUTES[tag.removeprefix("torch.")]
    found = getattr(torch, str(of), None)
    if not isinstance(found, kind):
        raise ValueError(f"torch has no {tag} {of}")
    return found


# ---- which rank saves an object --------------------------------------------------------------------------------------
# Decides whether an object's state is shared or each rank's own. A loader that is not elastic holds a rank's place in
# that rank's share of the data. Given to another rank, or divided among another number of them, samples are lost and
# repeated without a word: so it returns to its own rank, and a world of another size is refused unless the object says
# how its states are divided, or the script that it may begin anew.

Whose = Literal["all", "own", "divided"]
"""Every rank has the same (checked by digest); each its own; each its own, and the object can divide them anew."""

INLINE_BYTES = 65536
"""Tensors up to this are saved among an object's plain values, where they are each rank's own."""

_TENSOR = "\x00tensor of a rank"


def classify_state(name: str, subject: Any) -> Whose:
    """Classifies an object's state as shared, divided, or each rank's own.

    `loader`, and whatever is iterated over and does not say that it is elastic, is each rank's own.
    """
    if callable(getattr(subject, "load_state_dicts", None)):
        return "divided"
    iterated = hasattr(type(subject), "__iter__") and not isinstance(subject, Mapping)
    return "own" if (iterated or name == "loader") and not getattr(subject, "elastic", False) else "all"


@dataclass(frozen=True, slots=True)
class InlinedTensors:
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

        This object's keys in `shared_state_keys` are the first rank's: a thousand ranks would else save as many copies of
        what is alike for all.
        """
        once = getattr(self.subject, "shared_state_keys", ()) if self.whose == "divided" else ()
        if not once or name not in own or name not in first:
            return own
        return {name: {**own[name], **{key: first[name][key] for key in once if key in first[name]}}}

    def load_state_dict(self, state: Any) -> None:
        self.subject.load_state_dict(_restored(state))

    def load_state_dicts(self, states: Sequence[Any], rank: int, world_size: int) -> None:
        self.subject.load_state_dicts([_restored(state) for state in states], rank, world_size)


def value_digest(encoded: bytes) -> str:
    """Digests an object's values, independent of the order of their keys."""
    return digest(json.dumps(json.loads(encoded), sort_keys=True).encode())


def _inlined(tree: Any, whose: Whose) -> Any:
    if isinstance(tree, torch.Tensor):
        return _encode_tensor(tree) if _is_small(tree, whose) else tree
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


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
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
        return raw.view(dtype_from_name(said["dtype"])).reshape(said["shape"])
    if isinstance(tree, dict):
        items = ((key, _restored(value)) for key, value in tree.items())
        return dict(items) if type(tree) is dict else _like(tree, items)
    if type(tree) in (list, tuple):
        return type(tree)(_restored(value) for value in tree)
    return tree


# ---- objects ---------------------------------------------------------------------------------------------------------


class ObjectPart:
    """Saves one named object, copying its state eagerly.

    Nothing tells when an object changes its state, so it cannot be copied later.
    """

    def __init__(
        self, name: str, subject: Any, where: tuple[int, int], replicas: Replicas, spoken: InlinedTensors | None = None
    ) -> None:
        """`spoken`: what is asked for its state in place of the object itself."""
        if not (callable(getattr(subject, "state_dict", None)) and callable(getattr(subject, "load_state_dict", None))):
            raise ConfigurationError(
                f"{name} is a {type(subject).__name__} without state_dict and load_state_dict: it cannot be saved."
                " A loader needs them to go on where it was; surefoot.ElasticLoader has them"
            )
        self.name, self._subject = name, spoken or subject
        rank, world = where
        replicas = replicas.of_objects()
        default = replicas.of(name) or Grid.world_size(world)
        self.is_on_every_rank = default.count == world
        self._places = EntryPlacer(rank, default, replicas)
        self._incoming: dict[str, torch.Tensor] = {}

    def entries(self) -> Iterator[Entry]:
        for name, tensor in self._taken()[1].items():
            yield from self._places.of(name, tensor, "lowest")

    def values(self) -> Any:
        return self._taken()[0]

    def prepare(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Makes a tensor for each that the checkpoint has.

        It is like the object's own where there is one, else as it was saved. An object without saved tensors is not
        asked for its state: torchdata's nodes begin to iterate when asked, and ignore a state that is loaded
        afterwards.
        """
        wanted = list(marks(values))
        live = self._taken()[1] if wanted else {}
        self._incoming = {}
        for mark in wanted:
            own = live.get(mark.name)
            if own is not None and (is_dtensor(own) or _fits(own, mark, saved)):
                self._incoming[mark.name] = torch.empty_like(own)
            elif (made := build(mark.name, mark.facts, saved, BuildLocation(self._places.rank))) is not None:
                self._incoming[mark.name] = made

    def check_restorable(self, values: Any, saved: Mapping[str, SavedTensor]) -> None:
        """Builds the restored state aside and compares all but DTensors."""
        tree = self._subject.state_dict()
        scratch = built_marks(values, saved, BuildLocation(self._places.rank, scratch=True))
        scratch |= {name: tensor for name, tensor in self._taken(tree)[1].items() if is_dtensor(tensor)}
        again = insert_tensors(values, scratch.__getitem__, tree, self.name)
        if difference := first_difference(again, tree, self.name):
            raise StateNotRestorable(f"{difference} by a restore: give it as tensors, numbers and text in state_dict")

    def targets(self) -> Iterator[Entry]:
        for name, tensor in self._incoming.items():
            yield from self._places.of(name, tensor, "lowest")

    def apply(self, values: Any) -> None:
        live = self._subject.state_dict() if has_named_objects(values) else None
        self._subject.load_state_dict(insert_tensors(values, self._incoming.__getitem__, live, self.name))
        self._incoming = {}

    def _taken(self, tree: Any = None) -> tuple[Any, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        tree = self._subject.state_dict() if tree is None else tree
        return extract_tensors(tree, self.name, tensors, self._facts_of), tensors

    def _facts_of(self, tensor: torch.Tensor) -> Facts | None:
        """Describes a tensor, but no DTensor: one is only built like the object's own."""
        return None if is_dtensor(tensor) else facts_of(self.name, tensor)


def _fits(own: torch.Tensor, mark: TensorPlaceholder, saved: Mapping[str, SavedTensor]) -> bool:
    """Whether what the object has in its place is of the same kind and shape."""
    plain = mark.facts is None or set(mark.facts) == {"device"}
    return plain and mark.name in saved and tuple(own.shape) == saved[mark.name].shape
