"""Saves any object with `state_dict` and `load_state_dict`.

A scheduler, a loader, EMA, a scaler, or the user's own. Its tensors are taken for replicas and saved by the lowest
rank, unless they are each rank's own (`ownership`). Used by `program`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from surefoot.errors import ConfigurationError, StateNotRestorable
from surefoot.geometry.grids import Grid
from surefoot.state.entries import Entry, Saved, is_dtensor
from surefoot.state.ownership import Inlined
from surefoot.state.replicas import Replicas
from surefoot.state.tensor_building import Home, build, built_marks, facts_of
from surefoot.state.tensor_locations import EntryPlacer
from surefoot.state.trees import Facts, Mark, first_difference, marks, named, put_together, taken_apart


class ObjectPart:
    """Saves one named object, copying its state eagerly.

    Nothing tells when an object changes its state, so it cannot be copied later.
    """

    def __init__(
        self, name: str, subject: Any, where: tuple[int, int], replicas: Replicas, spoken: Inlined | None = None
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
        default = replicas.of(name) or Grid.world(world)
        self.everywhere = default.count == world
        self._places = EntryPlacer(rank, default, replicas)
        self._incoming: dict[str, torch.Tensor] = {}

    def entries(self) -> Iterator[Entry]:
        for name, tensor in self._taken()[1].items():
            yield from self._places.of(name, tensor, "lowest")

    def values(self) -> Any:
        return self._taken()[0]

    def prepare(self, values: Any, saved: Mapping[str, Saved]) -> None:
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
            elif (made := build(mark.name, mark.facts, saved, Home(self._places.rank))) is not None:
                self._incoming[mark.name] = made

    def prove(self, values: Any, saved: Mapping[str, Saved]) -> None:
        """Builds the restored state aside and compares all but DTensors."""
        tree = self._subject.state_dict()
        scratch = built_marks(values, saved, Home(self._places.rank, scratch=True))
        scratch |= {name: tensor for name, tensor in self._taken(tree)[1].items() if is_dtensor(tensor)}
        again = put_together(values, scratch.__getitem__, tree, self.name)
        if difference := first_difference(again, tree, self.name):
            raise StateNotRestorable(f"{difference} by a restore: give it as tensors, numbers and text in state_dict")

    def targets(self) -> Iterator[Entry]:
        for name, tensor in self._incoming.items():
            yield from self._places.of(name, tensor, "lowest")

    def apply(self, values: Any) -> None:
        live = self._subject.state_dict() if named(values) else None
        self._subject.load_state_dict(put_together(values, self._incoming.__getitem__, live, self.name))
        self._incoming = {}

    def _taken(self, tree: Any = None) -> tuple[Any, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        tree = self._subject.state_dict() if tree is None else tree
        return taken_apart(tree, self.name, tensors, self._facts_of), tensors

    def _facts_of(self, tensor: torch.Tensor) -> Facts | None:
        """Describes a tensor, but no DTensor: one is only built like the object's own."""
        return None if is_dtensor(tensor) else facts_of(self.name, tensor)


def _fits(own: torch.Tensor, mark: Mark, saved: Mapping[str, Saved]) -> bool:
    """Whether what the object has in its place is of the same kind and shape."""
    plain = mark.facts is None or set(mark.facts) == {"device"}
    return plain and mark.name in saved and tuple(own.shape) == saved[mark.name].shape
