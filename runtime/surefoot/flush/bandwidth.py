"""Holds the limits of one worker's copies beside its training.

A save on its way to other nodes and an upload share the network with the training's collectives; a training that waits
for its own checkpoints has lost what they were to save.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from surefoot.flush.token_bucket import TokenBucket
from surefoot.settings import JobSettings


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Limits a worker's copies to other nodes, and its uploads."""

    memory: TokenBucket = field(default_factory=TokenBucket)
    persistent: TokenBucket = field(default_factory=TokenBucket)

    def limit(self, limited: bool) -> None:
        """Limits both, or neither.

        Where nothing trains there is nothing to spare.
        """
        self.memory.limit(limited)
        self.persistent.limit(limited)


def bandwidth_of(job: JobSettings) -> Bandwidth:
    """Makes the limits that a job asks for."""
    uploads = job.persistent.bytes_per_second if job.persistent is not None else 0.0
    return Bandwidth(TokenBucket(job.memory_bytes_per_second), TokenBucket(uploads))
