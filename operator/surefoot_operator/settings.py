"""Defines the operator's limits and intervals, with units.

The entry points build these values and pass them down.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.protocol.timeouts import Backoff

_CLOSURES = Backoff(10.0, 600.0)
_RECONCILES = Backoff(0.05, 5.0)


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Limits of the coordinator: the server to which agents connect."""

    host: str = "127.0.0.1"
    """Address on which it listens."""
    port: int = 0
    """Port on which it listens; 0: any free port."""
    hello_timeout_seconds: float = 5.0
    """Time until a connection must have sent a valid, authenticated hello; after it, the connection is closed."""
    lead_wait_seconds: float = 3.5
    """Time for which a replica that does not lead keeps the connections of new agents, because it may lead in a moment."""
    close_timeout_seconds: float = 0.5
    """Time to wait for an orderly close of a connection before it is aborted."""
    max_queued_messages: int = 256
    """Maximum number of messages queued for one agent. A slower agent is disconnected, and gets the full state when it
    reconnects."""
    max_hello_bytes: int = 64 * 1024
    """Maximum number of bytes that a connection may send before its hello is accepted."""
    max_unauthenticated: int = 512
    """Maximum number of connections whose hello was not accepted yet; `lines` does not count them."""
    max_unauthenticated_per_address: int = 32
    """The same limit for one address, which the workers of a node or of a whole machine may share."""
    max_message_bytes: int = 64 * 1024 * 1024
    """Maximum size of a message from an agent: a listing of the persistent tier. Other messages have smaller limits
    (`surefoot_operator.coordinator.agent_server`)."""
    retry_unknown_jobs: bool = False
    """Whether agents of an unknown job are asked to retry: on a cluster, the operator may learn of a job after its agents
    connect."""
    max_agents: int = 4096
    """Maximum number of connected agents."""


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Limits of the operator's calls to memory servers."""

    call_timeout_seconds: float = 1.0
    """Timeout of one call."""
    probe_interval_seconds: float = 0.25
    """Interval at which each server is asked for its instance: how soon a server that restarted empty is detected."""
    read_interval_seconds: float = 0.5
    """Interval at which indexes are read while a generation is committed: the maximum age of a watermark."""
    idle_interval_seconds: float = 30.0
    """The same interval for a suspended or ended job, which only needs to know whether its checkpoint still exists."""
    gc_interval_seconds: float = 30.0
    """Interval at which old saves are deleted."""
    prefault_wait_seconds: float = 10.0
    """Maximum time for which a new server may prefault its memory before a job uses it."""
    quota_backoff: Backoff = _CLOSURES
    """Minimum time for which a job that exceeds its share of a server may not write there."""


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """Limits of one operator process."""

    coordinator: CoordinatorSettings = CoordinatorSettings()
    memory: MemorySettings = MemorySettings()
    metrics_port: int | None = None
    """Port on which each worker serves its metrics; 0: any free port; None: it serves none."""
    progress_interval_seconds: float = 0.5
    """Minimum time between two status writes that only report progress. Each is a call to the API server."""
    progress_write_delay_seconds: float = 0.0
    """Time after the start of a term in which progress of a job of a former leader is not written: its agents and memory
    servers reconnect first."""
    batch_seconds: float = 0.5
    """Time for which messages that change no decision (steps, saves) are collected before the next plan."""
    max_sleep_seconds: float = 2.0
    """Maximum time between two plans of a job, also without any message: a missed change costs no more than this."""
    max_idle_sleep_seconds: float = 60.0
    """The same for a suspended or ended job: hundreds of them must cost nearly nothing."""
    backoff: Backoff = _RECONCILES
    """Delay after a reconcile that failed."""
