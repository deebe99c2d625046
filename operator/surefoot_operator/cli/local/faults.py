"""Parses which faults are injected into a run, and at which step.

Pure; called by `run_local`. `KIND:NODE@step=N[,for=S]` and `coordinator@step=N[,for=S]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from surefoot.protocol.plain import shorten, shown
from surefoot_operator.api.spec import HealthPolicy

Kind = Literal["node", "trainer", "agent", "freeze", "memory", "drain", "nan", "slow", "sick", "garble", "coordinator"]
KINDS: tuple[Kind, ...] = (
    "node",
    "trainer",
    "agent",
    "freeze",
    "memory",
    "drain",
    "nan",
    "slow",
    "sick",
    "garble",
    "coordinator",
)

GRAMMAR = "KIND:NODE@step=N[,for=SECONDS] or coordinator@step=N[,for=SECONDS]"
_FAULT = re.compile(r"(?P<kind>[a-z]+)(:(?P<node>[^@]+))?@step=(?P<step>\d+)(,for=(?P<seconds>[^,]+))?")
_DEFAULT_SECONDS: dict[str, float] = {"freeze": 5.0, "coordinator": 2.0}
_RETURN: dict[str, str] = {
    "node": "returns",
    "freeze": "thaws",
    "memory": "returns",
    "drain": "takes workers again",
    "slow": "is as fast as the others",
    "coordinator": "returns",
}


class FaultError(ValueError):
    """A --fault that is not allowed; the message says what is."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to inject once a step is finished.

    `seconds`: until its target returns or thaws; None: it stays away, as every killed trainer or agent does.
    """

    kind: Kind
    node: str | None
    step: int
    seconds: float | None

    @property
    def strikes(self) -> str:
        """The target: no second fault hits it before it has returned."""
        return self.node or "coordinator"

    def __str__(self) -> str:
        until = f", {_RETURN[self.kind]} after {self.seconds:g} s" if self.seconds is not None else ""
        if self.kind == "nan":
            return f"turn the model of {self.node} NaN at step {self.step}"
        if self.kind == "sick":
            return f"have {self.node} calculate wrong, as whoever joins there finds, from step {self.step}"
        if self.kind == "garble":
            return f"have {self.node} garble what it sends others, as whoever joins there finds, from step {self.step}"
        if self.kind == "slow":
            return f"make the trainers of {self.node} slow at step {self.step}{until}"
        where = f" of {self.node}" if self.kind in ("trainer", "agent", "memory") else f" {self.node or ''}".rstrip()
        verb = self.kind if self.kind in ("freeze", "drain") else f"kill {self.kind}"
        return f"{verb}{where} at step {self.step}{until}".replace("kill node node", "kill node")


def returned(fault: Fault) -> str:
    """What its target does when the fault is over."""
    return _RETURN[fault.kind]


def parse_fault(text: str, nodes: tuple[str, ...]) -> Fault:
    """Parses one fault; a node is given by its name or number."""
    match = _FAULT.fullmatch(text)
    if match is None:
        raise FaultError(f"--fault {shorten(text)}: {GRAMMAR} is allowed; kinds are {', '.join(KINDS)}")
    kind = next((k for k in KINDS if k == match["kind"]), None)
    if kind is None:
        raise FaultError(
            f"--fault {shorten(text)}: {shown(match['kind'])} is not a kind of fault; kinds are {', '.join(KINDS)}"
        )
    step = int(match["step"]) if len(match["step"]) < 19 else 0
    if step < 1:
        raise FaultError(f"--fault {shorten(text)}: steps count from 1, and no job has 10^18 of them")
    return Fault(kind, _node(text, kind, match["node"], nodes), step, _seconds(text, kind, match["seconds"]))


def _node(text: str, kind: Kind, given: str | None, nodes: tuple[str, ...]) -> str | None:
    if kind == "coordinator":
        if given is not None:
            raise FaultError(f"--fault {shorten(text)}: the coordinator is on no node; write coordinator@step=N")
        return None
    if given is None:
        raise FaultError(f"--fault {shorten(text)}: which node? write {kind}:NODE@step=N")
    name = f"node-{given}" if given.isdigit() else given
    if name not in nodes:
        raise FaultError(f"--fault {shorten(text)}: there is no node {shorten(given)}; nodes are {_some(nodes)}")
    return name


def _some(nodes: tuple[str, ...]) -> str:
    return ", ".join(nodes[:8]) + (f", … {nodes[-1]}" if len(nodes) > 8 else "")


def _seconds(text: str, kind: Kind, given: str | None) -> float | None:
    if given is None:
        return _DEFAULT_SECONDS.get(kind)
    if kind not in _RETURN:
        raise FaultError(f"--fault {shorten(text)}: a killed {kind} does not return by itself; leave out for=")
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not math.isfinite(seconds) or seconds <= 0:
        raise FaultError(f"--fault {shorten(text)}: for={shorten(given)} must be a number of seconds above 0")
    return seconds


def parse_faults(texts: Iterable[str], nodes: tuple[str, ...]) -> tuple[Fault, ...]:
    """Parses all faults and sorts them by step."""
    return tuple(sorted((parse_fault(text, nodes) for text in texts), key=lambda fault: fault.step))


def check_faults(faults: Iterable[Fault], policy: HealthPolicy) -> None:
    """Refuses what this job would never notice.

    A node that only its check finds sick is sick to nobody where none is tried.
    """
    unseen = next((fault.kind for fault in faults if fault.kind in ("sick", "garble")), None)
    if policy.pre_join_check == "Off" and unseen is not None:
        raise FaultError(
            f"--fault {unseen}: this job tries no node before a worker joins, so nothing would follow; set"
            " spec.healthPolicy.preJoinCheck to Enforce, or to Warn"
        )


def due(faults: Iterable[Fault], struck: Iterable[Fault], step: int) -> list[Fault]:
    """Lists faults whose step is finished and that were not injected yet.

    A fault given twice is injected twice.
    """
    left = list(faults)
    for fault in struck:
        left.remove(fault)
    return [fault for fault in left if fault.step <= step]
