"""Defines the node and worker records of a run folder.

Pure values. `NodeRecord` and `WorkerState` are written by the node, `WorkerRecord` and `Deletion` by the fabric.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from surefoot.protocol.strict import Misfit, read

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HolderRecord:
    """One Redis of a node: its address and process identity."""

    host: str
    port: int
    life: str
    admin_user: str = "default"
    admin_password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A running node; `holder` is None until every Redis ran."""

    name: str
    life: str
    domain: str
    holder: HolderRecord | None = None
    message: str = ""
    cordoned: bool = False
    """It takes no further workers; not in its own record, and read beside it."""
    more_holders: tuple[HolderRecord, ...] = ()
    """Its servers behind the first."""

    @property
    def holders(self) -> tuple[HolderRecord, ...]:
        """Every Redis of it, by its number; none until all have run."""
        return () if self.holder is None else (self.holder, *self.more_holders)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker to run; `node` and `node_life` are set once bound."""

    name: str
    uid: str
    index: int
    attempt: int
    created_seconds: float
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    avoid_nodes: tuple[str, ...] = ()
    working_dir: str | None = None
    grace_seconds: float = 30.0
    node: str | None = None
    node_life: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A started worker's state, written by its node."""

    uid: str
    phase: Literal["Running", "Succeeded", "Failed"]
    life: str | None = None
    exit_code: int | None = None
    message: str = ""
    unstarted: bool = False
    """No process of it ever ran; `message` says why."""

    @property
    def over(self) -> bool:
        return self.phase != "Running"


@dataclass(frozen=True, slots=True)
class Deletion:
    """A request to end a worker: SIGTERM and grace period, or `force`."""

    uid: str
    force: bool
    at_seconds: float
    reason: str = ""
    """Why somebody else than the operator wants it to end."""


def to_json(record: Any) -> dict[str, Any]:
    """Converts a record to its file's content."""
    return typing.cast(dict[str, Any], msgspec.to_builtins(record))


def from_json(cls: type[T], body: Mapping[str, Any]) -> T:
    """Parses a record. Raises ValueError with the field and its value."""
    try:
        return read(cls, dict(body))
    except Misfit as misfit:
        raise ValueError(f"{cls.__name__}{misfit.path} {misfit.why}: a file in the run folder is damaged") from misfit
