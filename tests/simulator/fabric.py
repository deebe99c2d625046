"""A modelled fabric: nodes that hold Redis and at most one worker each, a scheduler, and an API that can lag.

What it shows is late: a dead node is noticed after a while, a frozen or parted one much later or never. Pods on a node
that cannot be reached stay until it returns, unless they are deleted by force; then their processes may live on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from simulator.agents import Agent
from simulator.calls import NO_ANSWER
from simulator.engine import Process
from simulator.tiers import Holder
from surefoot.agent import agent_state as on
from surefoot.agent.agent_state import TerminationGrace
from surefoot.protocol.checkpoints.placement import Topology
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance
from surefoot.protocol.messages import NodeFinding
from surefoot_operator.api.topology_levels import topology_path
from surefoot_operator.job_snapshot import ObservedNode, ObservedWorker
from surefoot_operator.platforms.kubernetes.views.observations import confirm_node_failures
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker

if TYPE_CHECKING:
    from simulator.world import Simulation


START_AGAIN_SECONDS = 3.0
"""From one try of a kubelet to start a worker to its next."""

INIT_FAILS = "init container fetch ended with exit code 7: cannot reach the data server"


@dataclass(eq=False)
class Pod:
    index: int
    attempt: int
    uid: str
    created: float
    node: str | None = None
    phase: str = "Pending"
    exit_code: int | None = None
    deleting: bool = False
    disrupted: bool = False
    """Its cluster has said that it will end it."""
    unstarted: str = ""
    """Why its kubelet cannot start it, as it says."""
    agent: Agent | None = None

    @property
    def name(self) -> str:
        return f"job-{self.index}-{self.attempt}"

    @property
    def over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


@dataclass(eq=False)
class Node:
    name: str
    holders: list[Holder] = field(default_factory=list)
    """The newest instance in each server's place."""
    alive: bool = True
    ready: bool = True
    """As the API shows it."""
    frozen: bool = False
    signal: str = ""
    findings: tuple[NodeFinding, ...] = ()
    """What its agents find wrong with it."""
    trial: str = "well"
    """What becomes of a trial of it; see `join_trials`."""
    flaw: str = ""
    """The reason that a trial which fails gives."""
    cordoned: bool = False
    """No pod is put here any more."""
    doubted_until: float = 0.0
    """Until then the cluster calls it silent, though it lives: it was away itself, and hears one node after another again."""
    rack: str = ""
    """That it stands in, by its label."""
    pods: list[Pod] = field(default_factory=list)
    """What really runs here, whatever the API says."""


class Fabric:
    def __init__(self, simulation: Simulation, names: list[str]) -> None:
        self.simulation, self.engine = simulation, simulation.engine
        self.nodes = {
            name: Node(
                name,
                rack=f"rack-{place * simulation.settings.racks // len(names)}" if simulation.settings.racks else "",
            )
            for place, name in enumerate(names)
        }
        self.pods: dict[tuple[int, int], Pod] = {}
        self.retired: list[Process] = []
        self.unkind_until = 0.0
        self.answers: Literal["at once", "no", "late", "never", "away"] = "at once"
        """How it answers whoever wants a worker made or deleted; `never`: it does so all the same."""
        self.unstartable = ""
        """Why no kubelet can start anything now; empty: they can. See `starting`."""
        self._past: tuple[tuple[ObservedWorker, ...], tuple[ObservedNode, ...]] | None = None
        for node in self.nodes.values():
            self._start_holders(node)

    # ---- what it shows ----------------------------------------------------------------------------------------------

    def stand_still(self, still: bool) -> None:
        """Whoever looks sees what is past, until it goes on."""
        self._past = (self.workers(), self.seen_nodes()) if still else None

    def workers(self) -> tuple[ObservedWorker, ...]:
        if self._past is not None:
            return self._past[0]
        return tuple(
            ObservedWorker(
                p.index, p.attempt, p.name, p.uid, p.node, p.phase, p.exit_code, "", p.created, p.deleting, p.disrupted,  # type: ignore[arg-type]
                start_blocker=p.unstarted,
            )
            for p in self.pods.values()
        )  # fmt: skip

    def seen_nodes(self) -> tuple[ObservedNode, ...]:
        if self._past is not None:
            return self._past[1]
        return confirm_node_failures(self._seen(node) for node in self.nodes.values())

    def _seen(self, node: Node) -> ObservedNode:
        doubt = "its kubelet was not heard" if node.ready and self.engine.now < node.doubted_until else ""
        schedulable, path = not node.cordoned, topology_path({"topology.kubernetes.io/rack": node.rack})
        return ObservedNode(
            node.name,
            node.name,
            node.ready,
            schedulable,
            evacuation_reason=node.signal,
            unconfirmed_failure=doubt,
            path=path,
        )

    def topology(self) -> Topology:
        """Where nodes stand, as an operator knows it."""
        return Topology(self.simulation.job.uid, {node.name: node.path for node in self.seen_nodes() if node.path})

    def free_nodes(self) -> int:
        return len(self._free())

    def _free(self) -> list[Node]:
        taken = {p.node for p in self.pods.values() if not p.over and p.node}
        return [n for n in self.nodes.values() if n.ready and n.alive and not n.cordoned and n.name not in taken]

    # ---- what it is told --------------------------------------------------------------------------------------------

    def asked(self, by: Process, perform: Callable[[], None], done: Callable[[str], None]) -> None:
        """One call of an operator; `done` hears the refusal, or nothing."""
        rng, after = self.engine.rng, self.engine.after
        match self.answers:
            case "at once":
                perform()
                done("")
            case "no":
                after(0.005, by, done, "403 Forbidden: exceeded quota")
            case "late":
                after(rng.uniform(1.0, 10.0), self.engine.environment, self._late, by, perform, done)
            case "never":
                after(rng.uniform(0.0, 10.0), self.engine.environment, perform)
                after(10.0, by, done, NO_ANSWER)
            case "away":
                after(10.0, by, done, NO_ANSWER)

    def _late(self, by: Process, perform: Callable[[], None], done: Callable[[str], None]) -> None:
        perform()
        self.engine.after(0.005, by, done, "")

    def create(self, order: CreateWorker) -> None:
        key = (order.index, order.attempt)
        if key in self.pods:
            return
        self.simulation.oracle.training.created(order)
        self.pods[key] = Pod(order.index, order.attempt, f"uid{self.simulation.next_number()}", self.engine.now)
        self.engine.after(self.engine.rng.uniform(0.02, 0.2), self.engine.environment, self._schedule, key, order)

    def _schedule(self, key: tuple[int, int], order: CreateWorker) -> None:
        pod = self.pods.get(key)
        if pod is None or pod.node is not None or pod.deleting:
            return
        free = self._free()
        wanted = [n for n in free if n.name not in order.avoid_nodes] or free
        if not wanted:
            self.engine.after(0.3, self.engine.environment, self._schedule, key, order)
            return
        node = self.engine.rng.choice(wanted)
        pod.node = node.name
        self.engine.after(self.engine.rng.uniform(0.05, 0.4), self.engine.environment, self._start, pod)

    def _start(self, pod: Pod) -> None:
        node = self.nodes[pod.node or ""]
        if pod.over or self.pods.get((pod.index, pod.attempt)) is not pod:
            return
        if pod.deleting:
            self._forget(pod)  # no kubelet starts what is to go
            return
        if not node.alive:
            self._over(pod, None, "Failed")
            return
        if node.frozen:
            self.engine.after(0.3, self.engine.environment, self._start, pod)
            return
        pod.unstarted = self.unstartable
        if self.unstartable:
            self._not_started(pod)
            return
        pod.phase = "Running"
        pod.agent = Agent(self.simulation, pod, node.name)
        node.pods.append(pod)
        self.engine.say("{} starts on {} as {}", pod.name, node.name, pod.agent.incarnation)
        self.simulation.changed()

    def _not_started(self, pod: Pod) -> None:
        """A kubelet tries again by itself, but a pod whose init container failed is over."""
        if pod.unstarted == INIT_FAILS:
            self._over(pod, None, "Failed")
            return
        self.simulation.changed()
        self.engine.after(START_AGAIN_SECONDS, self.engine.environment, self._start, pod)

    def delete(self, order: DeleteWorker) -> None:
        pod = next((p for p in self.pods.values() if p.name == order.name and p.uid == order.uid), None)
        if pod is None:
            return
        pod.deleting = True
        node = self.nodes.get(pod.node or "")
        reachable = node is not None and node.alive and not node.frozen and self._api_reaches(node.name)
        if order.force or pod.over or node is None or not node.alive:
            self._forget(pod)
        if reachable and not pod.over:
            self.engine.after(self.engine.rng.uniform(0.01, 1.0), self.engine.environment, self._end, pod)
        elif pod.agent is not None:
            self.engine.after(1.0, self.engine.environment, self._garbage, pod)

    def delete_gently(self, pod: Pod) -> None:
        """As people and drained nodes do: SIGTERM now, SIGKILL when the grace period ends."""
        pod.deleting = True
        self.simulation.changed()
        if pod.agent is None:
            self._forget(pod)
            return
        self.ask_to_leave(pod)
        self.engine.after(30.0, self.engine.environment, self._end, pod)

    def ask_to_leave(self, pod: Pod) -> None:
        """SIGTERM of a pod's agent, by whoever sends it."""
        if pod.agent is not None:
            now = self.engine.now
            event = on.TerminationRequested(143, TerminationGrace(now + 5.0, now + 10.0))
            self.engine.after(self.engine.rng.uniform(0.0, 0.2), pod.agent.process, pod.agent.tell, event)

    def _garbage(self, pod: Pod) -> None:
        """The kubelet ends what the API no longer wants, once it hears of it: late, after a thaw or a partition."""
        node = self.nodes[pod.node or ""]
        if not node.alive or pod.agent is None or not pod.agent.process.alive:
            self._forget(pod)
        elif node.frozen or not self._api_reaches(node.name):
            self.engine.after(1.0, self.engine.environment, self._garbage, pod)
        else:
            self.engine.after(self.engine.rng.uniform(0.0, 4.0), self.engine.environment, self._end, pod)

    def _end(self, pod: Pod) -> None:
        if pod.agent is not None:
            pod.agent.kill_all()
        self._forget(pod)

    def _forget(self, pod: Pod) -> None:
        if self.pods.get((pod.index, pod.attempt)) is pod:
            del self.pods[pod.index, pod.attempt]
            self.simulation.changed()

    def _api_reaches(self, node: str) -> bool:
        return self.simulation.network.reaches(node, "operator")

    # ---- what happens by itself -------------------------------------------------------------------------------------

    def left(self, agent: Agent, code: int) -> None:
        """The agent ended by itself."""
        agent.kill_all()
        pod = agent.pod
        self.engine.after(0.02, self.engine.environment, self._over, pod, code, "Succeeded" if code == 0 else "Failed")
        if pod.deleting:
            self.engine.after(0.05, self.engine.environment, self._forget, pod)

    def _over(self, pod: Pod, code: int | None, phase: str) -> None:
        if not pod.over:
            pod.phase, pod.exit_code = phase, code
            self.simulation.changed()

    def kill_agent(self, pod: Pod) -> None:
        """Its worker ends with it, or (a container restarted in its pod) another agent begins in its place."""
        if pod.agent is None or not pod.agent.process.alive:
            return
        pod.agent.kill_all()
        later = self.engine.rng.uniform(0.005, 0.3)
        if self.engine.rng.random() < 0.5:
            self.engine.after(later, self.engine.environment, self._over, pod, -9, "Failed")
        else:
            self.engine.after(later, self.engine.environment, self._begin_again, pod)

    def _begin_again(self, pod: Pod) -> None:
        node = self.nodes[pod.node or ""]
        if node.alive and not node.frozen and not pod.over and pod in node.pods and not pod.deleting:
            pod.agent = Agent(self.simulation, pod, node.name)
            self.engine.say("{} begins again as {}", pod.name, pod.agent.incarnation)
        elif not pod.over:
            self._over(pod, -9, "Failed")

    def kill_node(self, node: Node, silent: bool) -> None:
        """Everything on it ends. The API learns of it after a while, at once if its processes are our children."""
        node.alive, node.frozen = False, False
        for pod in node.pods:
            if pod.agent is not None:
                pod.agent.kill_all(silent)
        for holder in node.holders:
            self.kill_holder(holder, silent)
        dead, node.pods = node.pods, []
        notice = self.engine.rng.uniform(2.0, 8.0) if silent else self.engine.rng.uniform(0.02, 0.3)
        self.engine.after(notice, self.engine.environment, self._noticed, node, dead)

    def _noticed(self, node: Node, dead: list[Pod]) -> None:
        if not node.alive:
            node.ready = False
        for pod in dead:
            self._over(pod, None, "Failed")
        self.simulation.changed()

    def return_node(self, node: Node) -> None:
        if node.alive:
            return
        node.alive, node.ready = True, True
        self._start_holders(node)
        for pod in list(self.pods.values()):
            if pod.node == node.name and not pod.over and (pod.agent is None or not pod.agent.process.alive):
                self._over(pod, None, "Failed")
        self.simulation.changed()

    def freeze_node(self, node: Node) -> None:
        node.frozen = True
        for process in self.processes(node):
            self.engine.freeze(process)

    def thaw_node(self, node: Node) -> None:
        if node.frozen:
            node.frozen = False
            for process in self.processes(node):
                self.engine.thaw(process)

    def processes(self, node: Node) -> list[Process]:
        found = [holder.process for holder in node.holders]
        for pod in node.pods:
            if pod.agent is not None:
                found += [pod.agent.process, *(t.process for t in pod.agent.trainers)]
        return [p for p in found if p.alive]

    # ---- holders ----------------------------------------------------------------------------------------------------

    def _start_holders(self, node: Node) -> None:
        node.holders = [self._new_holder(node, server) for server in range(self.simulation.settings.servers)]

    def _new_holder(self, node: Node, server: int) -> Holder:
        number = self.simulation.next_number()
        endpoint = MemoryServerEndpoint(
            MemoryServerInstance(node.name, f"h{number}"), node.name, number, node.name, server_index=server
        )
        process = Process(f"holder {node.name}/h{number}", f"{node.name}/holder")
        holder = Holder(endpoint, process, self.simulation.rules, self.simulation.oracle)
        self.simulation.holders[endpoint.instance] = holder
        return holder

    def kill_holder(self, holder: Holder, silent: bool = False) -> None:
        if holder.process.alive:
            self.engine.kill(holder.process, silent)
            self.simulation.oracle.lost(holder)
            self.simulation.changed()

    def return_holder(self, holder: Holder) -> None:
        """Another instance begins in its place, unless one has."""
        node = self.nodes[holder.id.node]
        if node.alive and holder in node.holders and not holder.process.alive:
            node.holders[holder.endpoint.server_index] = self._new_holder(node, holder.endpoint.server_index)
            self.simulation.changed()
