"""Makes all ranks restore the same checkpoint, or the next older one.

Without an agent nobody stops the ranks when a checkpoint turns out to be damaged. A rank that chose another by itself
would train on another state than its peers; one that gave up would do so again at each start, beside good older
checkpoints. So each says how its reading ended, rank 0 decides for all, and they read again. Made by `backends`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from surefoot.checkpointer.library_mode.library import Decision
from surefoot.checkpointer.process_group import ProcessWorld, decide_together, withdraw
from surefoot.errors import SurefootError, Unreadable
from surefoot.protocol.identities import Checkpoint

log = logging.getLogger(__name__)

Again = Callable[[dict[Checkpoint, str]], str]
"""Chooses anew, given what proved unreadable and why; rank 0's alone."""


class RestoreAgreement:
    """Takes one rank's part in the agreement.

    `moved` receives each new decision before this rank reads again.
    """

    def __init__(
        self, world: ProcessWorld, decision: Decision, again: Again, moved: Callable[[Decision], None]
    ) -> None:
        self._world, self._decision, self._again, self._moved = world, decision, again, moved
        self._bad: dict[Checkpoint, str] = {}

    def agree(self, problem: Unreadable | None) -> bool:
        """Returns whether every rank read the checkpoint; if not, moves to another.

        Raises Unreadable where no older checkpoint is good.
        """
        parent = self._decision.lineage[-1].parent
        assert parent is not None, "only what was restored is agreed on"
        said = f"?{problem}" if problem is not None else ""
        found = decide_together(self._world, said, lambda words: self._decided(parent, words))
        if not found:
            return True
        self._decision = Decision.from_text(found)
        if problem is not None:
            log.warning("%s cannot be read: %s", parent, problem)
        log.warning("%s is restored instead of %s, on every rank", self._decision.lineage[-1].parent, parent)
        self._moved(self._decision)
        return False

    def withdraw(self, error: BaseException) -> None:
        """Fails the agreement after this rank's own error, so nobody waits."""
        withdraw(self._world, f"{type(error).__name__}: {error}")

    def _decided(self, parent: Checkpoint, said: list[str]) -> str:
        ended = [(rank, text[1:]) for rank, text in enumerate(said) if text.startswith("!")]
        if ended:
            raise SurefootError(f"rank {ended[0][0]} could not restore {parent}: {ended[0][1]}")
        unreadable = [(rank, text[1:]) for rank, text in enumerate(said) if text.startswith("?")]
        if not unreadable:
            return ""
        self._bad[parent] = f"rank {unreadable[0][0]} cannot read it: {unreadable[0][1]}"
        return self._again(self._bad)
