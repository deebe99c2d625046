"""What goes wrong with the cluster itself; `__main__` prints it as one sentence."""

from __future__ import annotations


class ClusterError(Exception):
    """What happened, to what, and what to do."""
