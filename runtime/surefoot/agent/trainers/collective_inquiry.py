"""Asks ranks that make no step which collective they are in.

Runs on the agent's loop; `heard` takes the answers that come over the trainers' lines. A rank that holds the GIL in C code
cannot answer, so no answer is waited for longer than for a stack, and what lacks is said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from surefoot.ipc.stacks import TAKE_SECONDS
from surefoot.ipc.trainer_messages import CollectivesTold, TellCollectives
from surefoot.protocol.hangs import Collective
from surefoot.protocol.text import listed

Answers = Mapping[int, CollectivesTold]
LONGEST = 1000
"""Characters that one worker's collectives may fill in an incident."""
_LONGEST_RANK = 400
_MOST_RANKS = 16


@dataclass(slots=True)
class CollectiveInquiry:
    """Asks the ranks of one agent.

    `tell` sends to a rank of an epoch, `attached` says who can be asked.
    """

    tell: Callable[[int, int, TellCollectives], None]
    attached: Callable[[int], frozenset[int]]
    _request: int = 0
    _answers: dict[int, CollectivesTold] = field(default_factory=dict)
    _awaited: frozenset[int] = frozenset()
    _complete: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, epoch: int, ranks: Iterable[int]) -> Answers:
        """Returns what each rank says within the time.

        Of a rank that did not answer it says why it may not have.
        """
        wanted = frozenset(ranks)
        self._request += 1
        self._answers, self._awaited = {}, wanted & self.attached(epoch)
        self._complete.clear()
        answers, request, awaited = self._answers, self._request, self._awaited
        for rank in awaited:
            self.tell(epoch, rank, TellCollectives(request))
        if awaited:
            try:
                async with asyncio.timeout(TAKE_SECONDS):
                    await self._complete.wait()
            except TimeoutError:
                pass  # said below, of whoever is missing
        late = f"it did not say within {TAKE_SECONDS:g} s: it holds the GIL, or is stopped"
        alone = "it cannot say: it has made no Checkpointer"
        return {
            rank: answers.get(rank, CollectivesTold(request, (), (), late if rank in awaited else alone))
            for rank in sorted(wanted)
        }

    def heard(self, rank: int, told: CollectivesTold) -> None:
        """Takes an answer; one to an earlier question is too late."""
        if told.request != self._request:
            return
        self._answers[rank] = told
        if self._awaited <= self._answers.keys():
            self._complete.set()


def collectives_of(answers: Answers) -> tuple[Collective, ...]:
    """Groups ranks by what they are in.

    Nothing if some rank said nothing, which proves nothing.
    """
    if not all(told.collectives for told in answers.values()):
        return ()
    ranks: dict[Collective, list[int]] = {}
    for rank, told in sorted(answers.items()):
        for one in told.collectives:
            ranks.setdefault(replace(one, ranks=()), []).append(rank)
    return tuple(replace(one, ranks=tuple(of)) for one, of in ranks.items())


def summary(answers: Answers) -> str:
    """Lists groups of ranks, smallest first, in LONGEST characters."""
    groups: dict[str, list[tuple[int, float]]] = {}
    for rank, told in sorted(answers.items()):
        waits = [(one, seconds) for one, seconds in zip(told.collectives, told.seconds, strict=False) if one.waits]
        last = min(zip(told.collectives, told.seconds, strict=False), key=lambda one: one[1], default=None)
        if waits:
            words, seconds = "waits in " + ", ".join(str(one) for one, _ in waits), waits[0][1]
        elif last is not None:
            words, seconds = f"in no collective, the last: {last[0]}", last[1]
        else:
            words, seconds = f"collective unknown: {told.why}", -1.0
        groups.setdefault(words[:_LONGEST_RANK], []).append((rank, seconds))
    lines = [
        f"{_ranks([rank for rank, _ in ranks])} {words}{_since(min(seconds for _, seconds in ranks))}"
        for words, ranks in sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    ]
    return "\n".join(lines)[:LONGEST]


def _since(seconds: float) -> str:
    return "" if seconds < 0.0 else f", made {seconds:.0f} s ago"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, _MOST_RANKS)}:"
