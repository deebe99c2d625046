"""Any object with `state_dict` and `load_state_dict`: scheduler, loader, EMA, scaler, or the user's own.

Its tensors are taken for replicas and saved by the lowest rank, unless they are each rank's own (`ownership`). Used by
`program`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from surefoot.errors import ConfigurationError
from surefoot.geometry.grids import Grid
from surefoot.state.entries import Entry, Saved, is_dtensor
from surefoot.state.ownership import Inlined
from surefoot.state.places import Places
from surefoot.state.replicas import Replicas
from surefoot.state.trees import marked, put_together, taken_apart


class ObjectPart:
    """One named object. What it gives is copied at once: nothing tells when it changes."""

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
        self._places = Places(rank, default, replicas)
        self._incoming: dict[str, torch.Tensor] = {}

    def entries(self) -> Iterator[Entry]:
        for name, tensor in self._taken()[1].items():
            yield from self._places.of(name, tensor, "lowest")

    def values(self) -> Any:
        return self._taken()[0]

    def prepare(self, values: Any, saved: Mapping[str, Saved]) -> None:
        """Makes a tensor for each that the checkpoint has: like the object's own where it has one, else on the host."""
        live = self._taken()[1]
        self._incoming = {}
        for name in marked(values):
            own = live.get(name)
            if own is not None and (is_dtensor(own) or (name in saved and tuple(own.shape) == saved[name].shape)):
                self._incoming[name] = torch.empty_like(own)
            elif name in saved:
                self._incoming[name] = saved[name].empty()

    def targets(self) -> Iterator[Entry]:
        for name, tensor in self._incoming.items():
            yield from self._places.of(name, tensor, "lowest")

    def apply(self, values: Any) -> None:
        self._subject.load_state_dict(put_together(values, self._incoming.__getitem__))
        self._incoming = {}

    def _taken(self) -> tuple[Any, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        return taken_apart(self._subject.state_dict(), self.name, tensors), tensors
