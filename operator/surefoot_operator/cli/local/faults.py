"""Parses which faults are injected into a run, and at which step.

Pure; called by `run_local`. `KIND:NODE@step=N[,for=S]` and `coordinator@step=N[,for=S]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from surefoot.protocol.plain import shorten, shown
from surefoot_operator.api.spec import HealthPolicy

Kind = Literal[
    "node",
    "trainer",
    "agent",
    "freeze",
    "hang",
    "oom",
    "memory",
    "drain",
    "cordon",
    "diskfull",
    "nan",
    "slow",
    "sick",
    "garble",
    "coordinator",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

GRAMMAR = "KIND:NODE@step=N[,for=SECONDS] or coordinator@step=N[,for=SECONDS]"
_FAULT = re.compile(r"(?P<kind>[a-z]+)(:(?P<node>[^@]+))?@step=(?P<step>\d+)(,for=(?P<seconds>[^,]+))?")
_LEAST_SECONDS: dict[str, float] = {"diskfull": 12.0}
"""What is over sooner may pass unseen: an agent looks at its disk every 10 s."""
_DEFAULT_SECONDS: dict[str, float] = {"freeze": 5.0, "coordinator": 2.0}
_RETURN: dict[str, str] = {
    "node": "{target} returns",
    "freeze": "{target} thaws",
    "hang": "whoever hangs on {target} goes on",
    "memory": "the memory of {target} returns",
    "drain": "{target} takes workers again",
    "cordon": "{target} takes workers again",
    "diskfull": "the disk of {target} has room again",
    "slow": "{target} is as fast as the others",
    "coordinator": "{target} returns",
}
_SENTENCES: dict[Kind, str] = {
    "node": "kill {target} at step {step}",
    "trainer": "kill trainer of {target} at step {step}",
    "agent": "kill agent of {target} at step {step}",
    "freeze": "freeze {target} at step {step}",
    "hang": "have a trainer of {target} hang at step {step}",
    "oom": "have the OOM killer end a trainer of {target} at step {step}",
    "memory": "kill memory of {target} at step {step}",
    "drain": "drain {target} at step {step}",
    "cordon": "cordon {target} at step {step}",
    "diskfull": "have the disk of {target} be full from step {step}",
    "nan": "turn the model of {target} NaN at step {step}",
    "slow": "make the trainers of {target} slow at step {step}",
    "sick": "have {target} calculate wrong, as whoever joins there finds, from step {step}",
    "garble": "have {target} garble what it sends others, as whoever joins there finds, from step {step}",
    "coordinator": "kill {target} at step {step}",
}
_GOES_ON: frozenset[Kind] = frozenset({"hang", "cordon", "diskfull", "slow"})
"""What is struck so runs on, and may be struck in another way meanwhile."""

_ENDS_NOTHING: frozenset[Kind] = frozenset({"cordon", "diskfull"})


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
    def target(self) -> str:
        """What it hits, by name."""
        return self.node or "coordinator"

    @property
    def ends_something(self) -> bool:
        """Whether a failure may be its work."""
        return self.kind not in _ENDS_NOTHING

    def waits_for(self, before: Fault) -> bool:
        """Whether `before` leaves nothing to strike until it is over."""
        return self.target == before.target and (self.kind == before.kind or before.kind not in _GOES_ON)

    def __str__(self) -> str:
        said = _SENTENCES[self.kind].format(target=self.target, step=self.step)
        return said if self.seconds is None else f"{said}, {_until(self)} after {self.seconds:g} s"


def returned(fault: Fault) -> str:
    """What is so once the fault is over, in a sentence."""
    return _RETURN[fault.kind].format(target="the coordinator" if fault.node is None else fault.node)


def _until(fault: Fault) -> str:
    """The end of that sentence."""
    return _RETURN[fault.kind].rpartition("{target} ")[2]


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
        raise FaultError(f"--fault {shorten(text)}: what {kind} strikes does not return by itself; leave out for=")
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not math.isfinite(seconds) or seconds <= 0:
        raise FaultError(f"--fault {shorten(text)}: for={shorten(given)} must be a number of seconds above 0")
    if seconds < (least := _LEAST_SECONDS.get(kind, 0.0)):
        raise FaultError(
            f"--fault {shorten(text)}: {kind} may pass unseen in so short a time; give for={least:g} or more"
        )
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
