"""Defines the operator's limits and intervals, with units.

Built by composition roots and passed down as values.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.protocol.timeouts import Backoff

_CLOSURES = Backoff(10.0, 600.0)
_RECONCILES = Backoff(0.05, 5.0)


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Limits of the agents' server."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    hello_timeout_seconds: float = 5.0
    """A connection that has not said hello, or could not be authenticated, by then is closed."""
    lead_seconds: float = 3.5
    """Agents that come to one that does not lead are kept for so long: it may lead in a moment, and nobody else does."""
    close_seconds: float = 0.5
    """How long a closing line is waited for before it is cut."""
    send_queue: int = 256
    """Messages waiting for one agent; one that takes fewer is closed, and hears everything anew when it returns."""
    hello_bytes: int = 64 * 1024
    """What a connection may send before its hello is accepted."""
    max_unauthenticated: int = 512
    """Connections in all whose hello was not accepted yet; they take nothing of `lines`."""
    max_unauthenticated_per_address: int = 32
    """The same of one address: behind one address stand the workers of a node, or of a whole machine."""
    message_bytes: int = 64 * 1024 * 1024
    """Largest message of an agent: a listing of the persistent tier. Others have limits of their own (`surefoot_operator.coordinator.agent_server`)."""
    foreign_retry: bool = False
    """Whether agents of a job that is not served here shall ask again: on a cluster, word of a job may come after them."""
    lines: int = 4096
    """Agents on their lines, in all."""


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Limits of the operator's calls to holders."""

    call_seconds: float = 1.0
    probe_seconds: float = 0.25
    """Holders are asked for their instance this often: how soon one that restarted empty is found."""
    read_seconds: float = 0.5
    """While Committed, indexes are read this often: how old a watermark may be."""
    rest_seconds: float = 30.0
    """A job at rest asks its holders this often: whether its checkpoint is still there is all that it wants to know."""
    gc_interval_seconds: float = 30.0
    prefault_wait_seconds: float = 10.0
    """A server that has just begun is left to its companion for so long at most, before a job makes it its own."""
    closures: Backoff = _CLOSURES
    """A job that takes more than its part of a holder may not write there for so long at least."""


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """Limits of one operator process."""

    coordinator: CoordinatorSettings = CoordinatorSettings()
    memory: MemorySettings = MemorySettings()
    metrics_port: int | None = None
    """Where each worker serves its metrics; 0: any free port of its machine; None: nowhere."""
    progress_seconds: float = 0.5
    """Writes that only report progress are at least so far apart. Seconds on a cluster: each is a call to its server."""
    progress_write_delay_seconds: float = 0.0
    """Of a job that a former leader reported on, progress alone is not written for so long: agents and holders come back first."""
    notice_seconds: float = 0.5
    """News that change no decision (steps, saves) are answered together after so long."""
    max_sleep_seconds: float = 2.0
    """Planned again after so long even if nothing was heard: a missed change costs no more."""
    rest_seconds: float = 60.0
    """The same for a job at rest, suspended or over: hundreds of them must cost nearly nothing."""
    backoff: Backoff = _RECONCILES
    """Wait after a reconcile that failed."""
