"""Parses the faults of a local run and injects each at its step.

`KIND:NODE@step=N[,for=S]` and `coordinator@step=N[,for=S]`. Parsing is pure; `FaultInjector` touches the machine and is called by
the supervisor at each tick.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from surefoot.protocol.text import short_repr, shorten
from surefoot_operator.api.spec import HealthPolicy
from surefoot_operator.platforms.local.local_nodes import LocalNodes

Strike = Callable[[LocalNodes, str, float | None], bool]
"""Strikes a node; False: nothing of that kind runs there at this moment."""


def _when_up(strike: Callable[[LocalNodes, str], None]) -> Strike:
    """A strike that waits for the node's process."""

    def strike_running(machine: LocalNodes, node: str, _seconds: float | None) -> bool:
        if machine.read_node_record(node) is None:
            return False
        strike(machine, node)
        return True

    return strike_running


def _at_once(strike: Callable[[LocalNodes, str], None]) -> Strike:
    """A strike that always succeeds."""

    def strike_any(machine: LocalNodes, node: str, _seconds: float | None) -> bool:
        strike(machine, node)
        return True

    return strike_any


class FaultKind(NamedTuple):
    """One kind of fault; `{target}` is the node's name or the coordinator."""

    sentence: str
    strike: Strike
    end: Callable[[LocalNodes, str], None] | None = None
    """Ends the fault; None: what it strikes does not return by itself."""
    end_sentence: str = ""
    default_seconds: float | None = None
    min_seconds: float = 0.0
    target_runs_on: bool = False
    """The target may be struck in another way meanwhile."""
    ends_something: bool = True
    """A failure may be its work."""


KINDS = {
    "node": FaultKind("kill {target}", _when_up(LocalNodes.kill_node), LocalNodes.start_node, "{target} returns"),
    "trainer": FaultKind("kill trainer of {target}", lambda machine, node, _: machine.kill_trainer(node)),
    "agent": FaultKind("kill agent of {target}", lambda machine, node, _: machine.kill_agent(node)),
    "freeze": FaultKind(
        "freeze {target}", _when_up(LocalNodes.freeze_node), LocalNodes.thaw_node, "{target} thaws", default_seconds=5.0
    ),
    "hang": FaultKind(
        "have a trainer of {target} hang",
        lambda machine, node, seconds: machine.inject_trainer_fault(
            node, "hang", "" if seconds is None else str(seconds)
        ),
        lambda machine, node: machine.cancel_fault(node, "hang"),
        "whoever hangs on {target} goes on",
        target_runs_on=True,
    ),
    "oom": FaultKind(
        "have the OOM killer end a trainer of {target}", lambda machine, node, _: machine.inject_oom_kill(node)
    ),
    "memory": FaultKind(
        "kill memory of {target}",
        lambda machine, node, _: machine.kill_servers(node),
        LocalNodes.restart_servers,
        "the memory of {target} returns",
    ),
    "drain": FaultKind(
        "drain {target}", _when_up(LocalNodes.drain_node), LocalNodes.uncordon_node, "{target} takes workers again"
    ),
    "cordon": FaultKind(
        "cordon {target}",
        _at_once(LocalNodes.cordon_node),
        LocalNodes.uncordon_node,
        "{target} takes workers again",
        target_runs_on=True,
        ends_something=False,
    ),
    "diskfull": FaultKind(
        "have the disk of {target} be full",
        _at_once(lambda machine, node: machine.write_fault_file(node, "diskfull")),
        lambda machine, node: machine.cancel_fault(node, "diskfull"),
        "the disk of {target} has room again",
        min_seconds=12.0,  # what is over sooner may pass unseen: an agent looks at its disk every 10 s
        target_runs_on=True,
        ends_something=False,
    ),
    "nan": FaultKind(
        "turn the model of {target} NaN", lambda machine, node, _: machine.inject_trainer_fault(node, "nan")
    ),
    "slow": FaultKind(
        "make the trainers of {target} slow",
        lambda machine, node, _: machine.inject_trainer_fault(node, "slow"),
        lambda machine, node: machine.cancel_fault(node, "slow"),
        "{target} is as fast as the others",
        target_runs_on=True,
    ),
    "sick": FaultKind(
        "have {target} calculate wrong, as whoever joins there finds,", _at_once(LocalNodes.fail_node_tests)
    ),
    "coordinator": FaultKind(
        "kill {target}",
        _at_once(lambda machine, _: machine.kill_operator()),
        lambda machine, _: machine.start_operator(),
        "{target} returns",
        default_seconds=2.0,
    ),
}

GRAMMAR = "KIND:NODE@step=N[,for=SECONDS] or coordinator@step=N[,for=SECONDS]"
_FAULT = re.compile(r"(?P<kind>[a-z]+)(:(?P<node>[^@]+))?@step=(?P<step>\d+)(,for=(?P<seconds>[^,]+))?")
_LASTING = ("diskfull", "sick")
"""Said to last from their step on."""


class FaultError(ValueError):
    """A --fault that is not allowed; the message says what is."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to inject once a step is finished.

    `seconds`: until it ends; None: it lasts, as the death of every trainer or agent does.
    """

    kind: str
    node: str | None
    step: int
    seconds: float | None

    @property
    def target(self) -> str:
        return self.node or "coordinator"

    @property
    def end_sentence(self) -> str:
        """What is so once the fault is over."""
        return KINDS[self.kind].end_sentence.format(target=self.node or "the coordinator")

    def waits_for(self, former: Fault) -> bool:
        """Whether `former` leaves nothing to strike until it is over."""
        is_blocking = self.kind == former.kind or not KINDS[former.kind].target_runs_on
        return self.target == former.target and is_blocking

    def __str__(self) -> str:
        kind = KINDS[self.kind]
        sentence = (
            f"{kind.sentence.format(target=self.target)} {'from' if self.kind in _LASTING else 'at'} step {self.step}"
        )
        if self.seconds is None:
            return sentence
        return f"{sentence}, {kind.end_sentence.rpartition('{target} ')[2]} after {self.seconds:g} s"


class InjectedFault(NamedTuple):
    """An injected fault, when and at which step."""

    fault: Fault
    at_seconds: float
    step: int


def parse_fault(text: str, nodes: tuple[str, ...]) -> Fault:
    """Parses one fault; a node is given by its name or number."""

    def refuse(why: str) -> FaultError:
        return FaultError(f"--fault {shorten(text)}: {why}")

    match = _FAULT.fullmatch(text)
    if match is None:
        raise refuse(f"{GRAMMAR} is allowed; kinds are {', '.join(KINDS)}")
    name, node, words = match["kind"], match["node"], match["seconds"]
    kind = KINDS.get(name)
    if kind is None:
        raise refuse(f"{short_repr(name)} is not a kind of fault; kinds are {', '.join(KINDS)}")
    step = int(match["step"]) if len(match["step"]) < 19 else 0
    if step < 1:
        raise refuse("steps count from 1, and no job has 10^18 of them")
    if name == "coordinator" and node is not None:
        raise refuse("the coordinator is on no node; write coordinator@step=N")
    if name != "coordinator" and node is None:
        raise refuse(f"which node? write {name}:NODE@step=N")
    if node is not None:
        node, given = f"node-{node}" if node.isdigit() else node, node
        if node not in nodes:
            node_names = ", ".join(nodes[:8]) + (f", … {nodes[-1]}" if len(nodes) > 8 else "")
            raise refuse(f"there is no node {shorten(given)}; nodes are {node_names}")
    if words is None:
        return Fault(name, node, step, kind.default_seconds)
    if kind.end is None:
        raise refuse(f"what {name} strikes does not return by itself; leave out for=")
    try:
        seconds = float(words)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise refuse(f"for={shorten(words)} must be a number of seconds above 0")
    if seconds < kind.min_seconds:
        raise refuse(f"{name} may pass unseen in so short a time; give for={kind.min_seconds:g} or more")
    return Fault(name, node, step, seconds)


def parse_faults(texts: Iterable[str], nodes: tuple[str, ...]) -> tuple[Fault, ...]:
    """Parses all faults and sorts them by step."""
    return tuple(sorted((parse_fault(text, nodes) for text in texts), key=lambda fault: fault.step))


def check_faults(faults: Iterable[Fault], policy: HealthPolicy) -> None:
    """Refuses what this job would never notice.

    A node that only its check finds unhealthy is so to nobody where none is checked.
    """
    if policy.pre_join_check == "Disabled" and any(fault.kind == "sick" for fault in faults):
        raise FaultError(
            "--fault sick: this job tries no node before a worker joins, so nothing would follow; set"
            " spec.healthPolicy.preJoinCheck to Enforce, or to Warn"
        )


class FaultInjector:
    """Strikes each fault once, when its step is finished, and ends those that do not last.

    `tell` gets each one's sentence, and whether it is a warning.
    """

    def __init__(self, faults: Iterable[Fault], machine: LocalNodes, tell: Callable[[str, bool], None]) -> None:
        self.struck: list[InjectedFault] = []
        self.pending = list(faults)
        self._machine = machine
        self._tell = tell
        self._lasting: list[tuple[float, Fault]] = []

    @property
    def any_returns(self) -> bool:
        """Whether anything that was struck comes back later."""
        return bool(self._lasting)

    def tick(self, step: int) -> None:
        """Strikes each fault whose step is finished and whose target runs; ends what lasted long enough."""
        for fault in [fault for fault in self.pending if fault.step <= step]:
            if any(fault.waits_for(former) for _, former in self._lasting):
                continue
            at_seconds = time.time()
            if not KINDS[fault.kind].strike(self._machine, fault.node or "", fault.seconds):
                continue  # nothing of that kind runs there at this moment (it is being replaced): at the next tick
            self.pending.remove(fault)
            self.struck.append(InjectedFault(fault, at_seconds, step))
            self._tell(f"fault: {fault}", True)
            if fault.seconds is not None:
                self._lasting.append((time.monotonic() + fault.seconds, fault))
        for end_at, fault in list(self._lasting):
            end = KINDS[fault.kind].end
            if time.monotonic() >= end_at and end is not None:
                self._lasting.remove((end_at, fault))
                end(self._machine, fault.node or "")
                self._tell(fault.end_sentence, False)
