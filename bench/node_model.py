"""What saves and restores cost a node of eight GPUs, reckoned from what was measured: `python -m bench.node_model`.

Pure. No such node was measured: each figure is the least that one of its parts allows, and the part is named. The constants
are medians of our own benchmarks; docs/sizing.md has a table of this program's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GPUS = 8
CORES = 16
"""Of the node's, beside those of loaders and of the training's own threads."""
NODE_MEMORY_GB = 2000.0

STALL_SECONDS_A_GB = 0.034
"""Of one rank: 83 ms for 2.44 GB where the host waits for the device at each step; ranks stall beside each other."""
DRAIN_CPU_SECONDS_A_GB = 0.7
"""All processes, two copies: digests, both writes, both Redis."""
HOLDER_CPU_SECONDS_A_GB = 0.16
"""Redis' one thread, for each GB that it is sent."""
RESTORE_GB_PER_SECOND_OF_A_RANK = 3.3
"""Two threads of one process, from holders, every byte verified (0.74 s for 2.44 GB, on a GPU)."""
RESTORE_CPU_SECONDS_A_GB = 0.75


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """Seconds, GB, and which part of the node each follows from."""

    state_gb: float
    link_gbits: float
    stall: float
    drain: float
    drain_bound: str
    restore: float
    restore_bound: str
    staging_gb: float
    holder_gb: float

    @property
    def fits(self) -> bool:
        return self.staging_gb + self.holder_gb < NODE_MEMORY_GB


def figures(rank_gb: float, link_gbits: float, servers: int = 1, keep: int = 1, pinned: int = 1) -> NodeFigures:
    """Of eight ranks with so much state each, on a link of so many Gb/s each way.

    A save has one copy on the node itself and one on another, which sends its own here: the link carries the state once
    each way, the node's servers take it twice.
    """
    state, link = GPUS * rank_gb, link_gbits / 8
    drain, drain_bound = _slowest(
        {
            "the link": state / link,
            f"{CORES} cores": state * DRAIN_CPU_SECONDS_A_GB / CORES,
            "Redis' threads": 2 * state * HOLDER_CPU_SECONDS_A_GB / servers,
        }
    )
    restore, restore_bound = _slowest(
        {
            "the link": state / link,
            f"{CORES} cores": state * RESTORE_CPU_SECONDS_A_GB / CORES,
            "two threads a rank": rank_gb / RESTORE_GB_PER_SECOND_OF_A_RANK,
        }
    )
    holder = (keep + 1 + pinned) * 2 * state
    stall = rank_gb * STALL_SECONDS_A_GB
    return NodeFigures(state, link_gbits, stall, drain, drain_bound, restore, restore_bound, 2 * state, holder)


def _slowest(parts: Mapping[str, float]) -> tuple[float, str]:
    name = max(parts, key=lambda one: parts[one])
    return parts[name], name


def main() -> None:
    print(
        "| state of a rank; node | link | stall | drained after, by | by four servers | restored after, by | staging; holders |"
    )
    print("|---|---|---|---|---|---|---|")
    for rank_gb in (10.0, 20.0, 40.0, 80.0):
        for link in (25.0, 100.0, 400.0):
            of, more = figures(rank_gb, link), figures(rank_gb, link, servers=4)
            room = f"{of.staging_gb:g}; {of.holder_gb:g} GB" + ("" if of.fits else ", more than the node has")
            print(
                f"| {rank_gb:g}; {of.state_gb:g} GB | {link:g} Gb/s | {of.stall:.2g} s | {of.drain:.0f} s, {of.drain_bound} |"
                f" {more.drain:.0f} s, {more.drain_bound} |"
                f" {of.restore:.0f} s, {of.restore_bound} | {room} |"
            )


if __name__ == "__main__":
    main()
