"""Injects the faults of one local run, and brings back what returns.

Touches the machine; called by `supervise` with each tick.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from surefoot_operator.cli.local.faults import Fault, due, returned
from surefoot_operator.cli.local.run_report import Struck
from surefoot_operator.platforms.local.local_nodes import Machine


@dataclass(slots=True)
class _Return:
    """Something that was struck and comes back."""

    fault: Fault
    at: float


class FaultInjector:
    """Strikes faults at their steps, each once.

    `tell` gets each one's sentence, and whether it is a warning. `port`: of the operator, for its return.
    """

    def __init__(
        self, faults: tuple[Fault, ...], machine: Machine, tell: Callable[[str, bool], None], port: int
    ) -> None:
        self.struck: list[Struck] = []
        self.operator_away = False
        """A fault ended the operator, and has not brought it back."""
        self._faults = faults
        self._machine = machine
        self._tell = tell
        self._port = port
        self._returns: list[_Return] = []

    @property
    def returning(self) -> bool:
        """Whether anything that was struck comes back later."""
        return bool(self._returns)

    def unstruck(self) -> list[Fault]:
        """Faults whose step the job never finished."""
        left = list(self._faults)
        for struck in self.struck:
            left.remove(struck.fault)
        return left

    def strike_what_is_due(self, step: int) -> None:
        """Strikes each fault whose step is finished and whose target runs."""
        for fault in due(self._faults, [s.fault for s in self.struck], step):
            if any(fault.waits_for(r.fault) for r in self._returns):
                continue
            at = time.time()
            if not self._strike(fault):
                continue  # nothing of that kind runs there at this moment (it is being replaced): at the next tick
            self.struck.append(Struck(fault, at, step))
            self._tell(f"fault: {fault}", True)
            if fault.seconds is not None:
                self._returns.append(_Return(fault, time.monotonic() + fault.seconds))

    def _strike(self, fault: Fault) -> bool:
        machine, node = self._machine, fault.node or ""
        match fault.kind:
            case "node":
                if machine.node_record(node) is None:
                    return False
                machine.kill_node(node)
            case "freeze":
                if machine.node_record(node) is None:
                    return False
                machine.freeze_node(node)
            case "cordon":
                machine.cordon_node(node)
            case "drain":
                if machine.node_record(node) is None:
                    return False
                machine.drain_node(node)
            case "trainer":
                return machine.kill_trainer(node)
            case "agent":
                return machine.kill_agent(node)
            case "hang":
                return machine.hang_trainer(node, fault.seconds)
            case "oom":
                return machine.exhaust_memory(node)
            case "memory":
                return machine.kill_holder(node)
            case "diskfull":
                machine.fill_disk(node)
            case "nan":
                return machine.spoil_model(node)
            case "sick":
                machine.sicken_node(node)
            case "garble":
                machine.garble_node(node)
            case "slow":
                return machine.slow_trainers(node)
            case "coordinator":
                self.operator_away = True
                machine.kill_operator()
        return True

    def return_what_is_due(self) -> None:
        """Brings back what was away for long enough."""
        now = time.monotonic()
        for back in [r for r in self._returns if now >= r.at]:
            self._returns.remove(back)
            node = back.fault.node or ""
            match back.fault.kind:
                case "node":
                    self._machine.start_node(node)
                case "freeze":
                    self._machine.thaw_node(node)
                case "drain" | "cordon":
                    self._machine.uncordon_node(node)
                case "slow" | "hang" | "diskfull" as kind:
                    self._machine.take_back(node, kind)
                case "memory":
                    self._machine.return_holder(node)
                case _:
                    self._machine.start_operator(self._port)
                    self.operator_away = False
            self._tell(returned(back.fault), False)
