"""What a run has put on this machine, written to disk as it happens, so that a later command can take it away."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster import layout
from cluster.errors import ClusterError
from cluster.processes import Recorded, is_alive

SYSCTLS = (  # kubelet writes these on the host
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


@dataclass
class State:
    """`processes` by daemon name, a node's first process under the node's name."""

    engine: str
    node_count: int
    boot_id: str
    project: str
    processes: dict[str, Recorded] = field(default_factory=dict)
    sysctls: dict[str, str] = field(default_factory=dict)
    made_folders: list[str] = field(default_factory=list)
    is_complete: bool = False  # `up` came to its end; what it left half-made is not repaired but taken away

    def save(self) -> None:
        """Whole or not at all."""
        layout.ROOT.mkdir(parents=True, exist_ok=True)
        fresh = layout.STATE_FILE.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self), indent=1))
        os.replace(fresh, layout.STATE_FILE)

    def record(self, name: str, process: Recorded) -> None:
        """Remembers a process that was just started."""
        self.processes[name] = process
        self.save()

    def is_alive(self, name: str) -> bool:
        """Whether the daemon or the node of that name runs (or is frozen)."""
        return name in self.processes and is_alive(self.processes[name])

    @property
    def is_of_this_boot(self) -> bool:
        """False after a reboot: ids then belong to strangers, though start times tell them apart too."""
        return self.boot_id == boot_id()


def boot_id() -> str:
    """Changes with each boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def fresh(engine: str, node_count: int) -> State:
    """The record of a cluster that is about to be made."""
    sysctls = {}
    for name in SYSCTLS:
        sysctls[name] = Path("/proc/sys", name).read_text().strip()
    return State(engine, node_count, boot_id(), str(layout.PROJECT), sysctls=sysctls)


def load() -> State | None:
    """What stands on disk; None where there is no cluster."""
    try:
        body = json.loads(layout.STATE_FILE.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ClusterError(f"{layout.STATE_FILE} cannot be read ({error}); look at it, then remove it") from None
    body["processes"] = {name: Recorded(**process) for name, process in body["processes"].items()}
    return State(**body)


def required() -> State:
    """The cluster's record; fails where there is none."""
    found = load()
    if found is None:
        raise ClusterError("there is no cluster; start one with `up`")
    return found


@contextmanager
def locked() -> Iterator[None]:
    """One command at a time; the lock lies outside the cluster's folder so that `down` can remove that whole."""
    layout.CACHE.mkdir(parents=True, exist_ok=True)
    with layout.COMMAND_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
