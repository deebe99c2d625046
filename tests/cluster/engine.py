"""What every way of having a cluster owes: the verbs, and the facts that tests and the demo need. Tests do not know which one they run on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

READY_SECONDS = 120.0


@dataclass(frozen=True)
class Facts:
    """How to reach a running cluster. `host_prefix`: where its nodes see this machine's root folder."""

    kubeconfig: Path
    programs: list[Path]
    s3_endpoint: str
    node_names: list[str]
    host_prefix: str


@dataclass(frozen=True)
class NodeStatus:
    """`ready` is what the API server believes; the rest is what is so."""

    name: str
    ready: bool
    is_running: bool
    is_frozen: bool
    is_joined: bool
    has_kubelet: bool

    @property
    def is_well(self) -> bool:
        """Nothing was done to it, or it came back."""
        return self.ready and self.is_running and self.is_joined and self.has_kubelet and not self.is_frozen


@dataclass(frozen=True)
class Status:
    """The whole picture; `daemons` are the host's, name → runs."""

    engine: str
    api_answers: bool
    nodes: list[NodeStatus]
    daemons: dict[str, bool] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        """Everything runs and every node is Ready."""
        return self.api_answers and all(self.daemons.values()) and all(node.is_well for node in self.nodes)


class Engine(Protocol):
    """Nodes are meant by name. Each verb returns when it is done; `return_node` and `up` when the node is Ready."""

    def up(self, count: int) -> None: ...
    def down(self) -> None: ...
    def status(self) -> Status: ...
    def facts(self) -> Facts: ...
    def crash(self, node: str, silently: bool = False) -> None: ...
    def return_node(self, node: str) -> None: ...
    def freeze(self, node: str) -> None: ...
    def thaw(self, node: str) -> None: ...
    def partition(self, node: str) -> None: ...
    def heal(self, node: str) -> None: ...
    def stop_kubelet(self, node: str) -> None: ...
    def kill_container(self, namespace: str, pod: str, container: str | None = None) -> None: ...
    def kill_daemon(self, name: str) -> None: ...
    def start_daemon(self, name: str) -> None: ...
