"""What a case of the matrix is: a library's program, cut into one step, and what of it must survive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Context:
    """Where a program finds itself. `seed` is of its random weights, another in each life; `scratch` is of all lives."""

    rank: int
    world: int
    seed: int
    scratch: Path


def nothing(_: int) -> None:
    """Most scripts do nothing behind a step."""


def world_of(ranks: int, resumed: int, again: int = 0) -> str:
    """Whether a row goes on with as many ranks (0: as many) or with another number of them, and then with yet another."""
    if again:
        return f"{ranks}→{resumed}→{again}"
    return "resized" if resumed and resumed != ranks else "same"


def title_of(area: str, name: str, world: str) -> str:
    return f"{area}: {name} ({world})"


@dataclass(slots=True)
class Training:
    """A program that was built.

    `advance` runs one step and returns the loss, of all ranks; `behind` is what the script does between
    `checkpointer.step` and the next step; `picture` gathers what must be equal, where the objects' own states are not
    it; `samples` says what this rank drew for its last step.
    """

    objects: dict[str, Any]
    advance: Callable[[int], float]
    behind: Callable[[int], None] = nothing
    picture: Callable[[], Mapping[str, Any]] | None = None
    samples: Callable[[], list[int]] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """One row: `build` makes the program on each of `ranks`, of `resumed` ranks after the kill, of `again` after another."""

    area: str
    name: str
    build: Callable[[Context], Training]
    ranks: int = 1
    resumed: int = 0
    again: int = 0
    quick: bool = False

    @property
    def world(self) -> str:
        return world_of(self.ranks, self.resumed, self.again)

    @property
    def afterwards(self) -> int:
        return self.resumed or self.ranks

    @property
    def title(self) -> str:
        return title_of(self.area, self.name, self.world)


@dataclass(frozen=True, slots=True)
class Unrun:
    """A row of what cannot be run where the others are, with the true reason."""

    area: str
    name: str
    why: str
    world: str = "same"
    quick: bool = True

    @property
    def title(self) -> str:
        return title_of(self.area, self.name, self.world)
