"""Parses the `--fault` options of a local run and injects each fault at its step.

A fault is `KIND:NODE@step=N[,for=S]` or `coordinator@step=N[,for=S]`. Parsing is pure; `FaultInjector` acts on the
local processes and is called by the supervisor at each tick.
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
"""Function that injects a fault on a node; it returns False if its target does not run at this moment."""


def _strike_when_up(strike: Callable[[LocalNodes, str], None]) -> Strike:
    """Returns a strike that waits until the node's process runs."""

    def strike_running(machine: LocalNodes, node: str, _seconds: float | None) -> bool:
        if machine.read_node_record(node) is None:
            return False
        strike(machine, node)
        return True

    return strike_running


def _strike_at_once(strike: Callable[[LocalNodes, str], None]) -> Strike:
    """Returns a strike that succeeds whether or not the node's process runs."""

    def strike_any(machine: LocalNodes, node: str, _seconds: float | None) -> bool:
        strike(machine, node)
        return True

    return strike_any


class FaultKind(NamedTuple):
    """A kind of fault: how it is injected and ended. In texts `{target}` is the node's name or the coordinator."""

    sentence: str
    strike: Strike
    end: Callable[[LocalNodes, str], None] | None = None
    """Function that ends the fault; None if its target does not return by itself."""
    end_sentence: str = ""
    default_seconds: float | None = None
    min_seconds: float = 0.0
    target_runs_on: bool = False
    """Whether a fault of another kind may strike the target during this one."""
    ends_something: bool = True
    """Whether the fault can cause a failure, and so can be named as the cause of an incident."""


KINDS = {
    "node": FaultKind(
        "kill {target}", _strike_when_up(LocalNodes.kill_node), LocalNodes.start_node, "{target} returns"
    ),
    "trainer": FaultKind("kill trainer of {target}", lambda machine, node, _: machine.kill_trainer(node)),
    "agent": FaultKind("kill agent of {target}", lambda machine, node, _: machine.kill_agent(node)),
    "freeze": FaultKind(
        "freeze {target}",
        _strike_when_up(LocalNodes.freeze_node),
        LocalNodes.thaw_node,
        "{target} thaws",
        default_seconds=5.0,
    ),
    "hang": FaultKind(
        "have a trainer of {target} hang",
        lambda machine, node, seconds: machine.inject_trainer_fault(
            node, "hang", "" if seconds is None else str(seconds)
        ),
        lambda machine, node: machine.cancel_fault(node, "hang"),
        "the rank that hangs on {target} continues",
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
        "drain {target}",
        _strike_when_up(LocalNodes.drain_node),
        LocalNodes.uncordon_node,
        "{target} takes workers again",
    ),
    "cordon": FaultKind(
        "cordon {target}",
        _strike_at_once(LocalNodes.cordon_node),
        LocalNodes.uncordon_node,
        "{target} takes workers again",
        target_runs_on=True,
        ends_something=False,
    ),
    "diskfull": FaultKind(
        "have the disk of {target} be full",
        _strike_at_once(lambda machine, node: machine.write_fault_file(node, "diskfull")),
        lambda machine, node: machine.cancel_fault(node, "diskfull"),
        "the disk of {target} has room again",
        min_seconds=12.0,  # agents check their disk every 10 s and may miss a shorter fault
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
        "make {target} compute wrong results, which its next node test finds,",
        _strike_at_once(LocalNodes.fail_node_tests),
    ),
    "coordinator": FaultKind(
        "kill {target}",
        _strike_at_once(lambda machine, _: machine.kill_operator()),
        lambda machine, _: machine.start_operator(),
        "{target} returns",
        default_seconds=2.0,
    ),
}

GRAMMAR = "KIND:NODE@step=N[,for=SECONDS] or coordinator@step=N[,for=SECONDS]"
_FAULT_PATTERN = re.compile(r"(?P<kind>[a-z]+)(:(?P<node>[^@]+))?@step=(?P<step>\d+)(,for=(?P<seconds>[^,]+))?")
_ENDLESS_KINDS = ("diskfull", "sick")
"""Kinds whose description says `from step N`, as they last."""


class FaultError(ValueError):
    """Invalid `--fault` option; the message names the allowed values."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject once its step is finished."""

    kind: str
    """Key in KINDS."""
    node: str | None
    """Name of the node; None for the coordinator."""
    step: int
    """Step after which the fault is injected."""
    seconds: float | None
    """Duration of the fault; None if nothing ends it, as for a killed trainer or agent."""

    @property
    def target(self) -> str:
        return self.node or "coordinator"

    @property
    def end_sentence(self) -> str:
        """Sentence that is printed when the fault ends."""
        return KINDS[self.kind].end_sentence.format(target=self.node or "the coordinator")

    def waits_for(self, earlier: Fault) -> bool:
        """Returns whether this fault must wait for the end of `earlier`, which occupies the same target."""
        is_blocking = self.kind == earlier.kind or not KINDS[earlier.kind].target_runs_on
        return self.target == earlier.target and is_blocking

    def __str__(self) -> str:
        kind = KINDS[self.kind]
        sentence = f"{kind.sentence.format(target=self.target)} {'from' if self.kind in _ENDLESS_KINDS else 'at'} step {self.step}"
        if self.seconds is None:
            return sentence
        return f"{sentence}, {kind.end_sentence.rpartition('{target} ')[2]} after {self.seconds:g} s"


class InjectedFault(NamedTuple):
    """A fault that was injected, with the Unix time and the step at that moment."""

    fault: Fault
    at_seconds: float
    step: int


def parse_fault(text: str, nodes: tuple[str, ...]) -> Fault:
    """Parses one fault, whose node is given by name or by number. Raises FaultError."""

    def fault_error(reason: str) -> FaultError:
        return FaultError(f"--fault {shorten(text)}: {reason}")

    match = _FAULT_PATTERN.fullmatch(text)
    if match is None:
        raise fault_error(f"{GRAMMAR} is allowed; kinds are {', '.join(KINDS)}")
    name, node, seconds_text = match["kind"], match["node"], match["seconds"]
    kind = KINDS.get(name)
    if kind is None:
        raise fault_error(f"{short_repr(name)} is not a kind of fault; kinds are {', '.join(KINDS)}")
    step = int(match["step"]) if len(match["step"]) < 19 else 0
    if step < 1:
        raise fault_error("steps count from 1, and no job has 10^18 of them")
    if name == "coordinator" and node is not None:
        raise fault_error("the coordinator is on no node; write coordinator@step=N")
    if name != "coordinator" and node is None:
        raise fault_error(f"which node? write {name}:NODE@step=N")
    if node is not None:
        node, node_text = f"node-{node}" if node.isdigit() else node, node
        if node not in nodes:
            node_names = ", ".join(nodes[:8]) + (f", … {nodes[-1]}" if len(nodes) > 8 else "")
            raise fault_error(f"there is no node {shorten(node_text)}; nodes are {node_names}")
    if seconds_text is None:
        return Fault(name, node, step, kind.default_seconds)
    if kind.end is None:
        raise fault_error(f"what {name} strikes does not return by itself; leave out for=")
    try:
        seconds = float(seconds_text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise fault_error(f"for={shorten(seconds_text)} must be a number of seconds above 0")
    if seconds < kind.min_seconds:
        raise fault_error(f"{name} may pass unseen in so short a time; give for={kind.min_seconds:g} or more")
    return Fault(name, node, step, seconds)


def parse_faults(texts: Iterable[str], nodes: tuple[str, ...]) -> tuple[Fault, ...]:
    """Parses all faults and sorts them by step."""
    return tuple(sorted((parse_fault(text, nodes) for text in texts), key=lambda fault: fault.step))


def check_faults(faults: Iterable[Fault], policy: HealthPolicy) -> None:
    """Rejects a fault that this job cannot notice.

    A `sick` node fails only its node test, which this job may have disabled.

    Raises:
        FaultError: The fault would have no effect.
    """
    if policy.pre_join_check == "Disabled" and any(fault.kind == "sick" for fault in faults):
        raise FaultError(
            "--fault sick: this job tests no node before a worker joins, so the fault would have no effect; set"
            " spec.healthPolicy.preJoinCheck to Enforce, or to Warn"
        )


class FaultInjector:
    """Injects each fault once its step is finished, and ends it after its duration.

    `report` is called with a sentence at each start and end, and with whether it is a warning.
    """

    def __init__(self, faults: Iterable[Fault], machine: LocalNodes, report: Callable[[str, bool], None]) -> None:
        self.struck: list[InjectedFault] = []
        self.pending = list(faults)
        self._machine = machine
        self._report = report
        self._active: list[tuple[float, Fault]] = []

    @property
    def any_returns(self) -> bool:
        """Whether an injected fault will still end and so return its target."""
        return bool(self._active)

    def tick(self, step: int) -> None:
        """Injects the faults whose step is finished and whose target runs; ends those whose duration is over."""
        # Inject the faults that are due. Iterate over a copy, as injected faults leave the list.
        for fault in [fault for fault in self.pending if fault.step <= step]:
            if any(fault.waits_for(earlier) for _, earlier in self._active):
                continue
            at_seconds = time.time()
            if not KINDS[fault.kind].strike(self._machine, fault.node or "", fault.seconds):
                continue  # the target is being replaced and does not run now: try again at the next tick
            self.pending.remove(fault)
            self.struck.append(InjectedFault(fault, at_seconds, step))
            self._report(f"fault: {fault}", True)
            if fault.seconds is not None:
                self._active.append((time.monotonic() + fault.seconds, fault))
        # End the faults whose duration is over, which returns their targets.
        for end_seconds, fault in list(self._active):
            end = KINDS[fault.kind].end
            if time.monotonic() >= end_seconds and end is not None:
                self._active.remove((end_seconds, fault))
                end(self._machine, fault.node or "")
                self._report(fault.end_sentence, False)
