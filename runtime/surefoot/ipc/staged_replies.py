"""Collects the agent's replies to `FindStagedSaves`, or closes every descriptor.

Each answer may carry a descriptor, which somebody has to close whatever comes of it. Owned by `agent_client`, which
guards it by its lock.
"""

from __future__ import annotations

import os

from surefoot.ipc.trainer_messages import StagedSaves

Answer = tuple[StagedSaves, int | None]


class StagedReplies:
    """Collects replies to one question at a time, and ignores later ones."""

    def __init__(self) -> None:
        self._asking = False
        self._told: list[Answer] = []

    def begin(self) -> None:
        """The question is about to be asked."""
        self._asking = True

    def take(self, here: StagedSaves, descriptor: int | None) -> None:
        """Takes one reply; the first says how many follow."""
        if self._asking:
            self._told.append((here, descriptor))
        elif descriptor is not None:
            os.close(descriptor)

    @property
    def complete(self) -> bool:
        return bool(self._told) and len(self._told) > self._told[0][0].further

    def end(self) -> list[Answer]:
        """Hands over all replies with their descriptors; none if incomplete."""
        told, complete = self._told, self.complete
        self._told, self._asking = [], False
        if complete:
            return told
        for _, descriptor in told:
            if descriptor is not None:
                os.close(descriptor)
        return []
