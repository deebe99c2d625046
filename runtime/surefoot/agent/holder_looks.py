"""Looks at holders for an operator that does not reach them.

In threads; used by `surefoot.agent.coordinator_requests`, on its loop. A claim waits for the answer: each holder is sealed and read as the
operator would, and what was read is told before the Sighting that ends the request. Whoever asked asks again if no answer
comes: a full queue drops the oldest request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from surefoot import metrics
from surefoot.errors import SurefootError
from surefoot.memory_server.client import HolderClient
from surefoot.memory_server.connection import account_of
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import HolderEndpoint
from surefoot.protocol.sighting_messages import HolderReading, LookAtHolders, Sighting
from surefoot.settings import JobSettings

log = logging.getLogger(__name__)

_QUEUE = 256
_AT_ONCE = 8
"""Of holders that may all be silent, each for a call's whole time limit."""
_MOST_LOOKED_AT = 64
MOST_CHARACTERS = 4 << 20
"""Of one holder's manifests and layout records: half of what the coordinator takes in one message, as JSON doubles quotes."""


@dataclass(frozen=True, slots=True)
class LookOutcome:
    """What one look at a holder found.

    `trouble` says why it gave no index.
    """

    trouble: str = ""
    reading: HolderReading | None = None


class HolderLooks:
    """`run` until cancelled. Answers go to `answer`, on the loop."""

    def __init__(self, job: JobSettings, answer: Callable[[HolderReading | Sighting], None]) -> None:
        self._job, self._answer = job, answer
        self._asked: asyncio.Queue[LookAtHolders] = asyncio.Queue(_QUEUE)

    def ask(self, request: LookAtHolders) -> None:
        """Queues a request; a full queue drops the oldest."""
        if self._asked.full():
            self._asked.get_nowait()  # asked again by then
        self._asked.put_nowait(request)

    async def run(self) -> None:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(request: LookAtHolders, endpoint: HolderEndpoint) -> str:
            async with turns:
                look = await asyncio.to_thread(self._looked, request, endpoint)
            if look.reading is not None:
                self._answer(look.reading)
            return look.trouble

        while True:
            request = await self._asked.get()
            asked = request.holders[:_MOST_LOOKED_AT]
            trouble = tuple(await asyncio.gather(*(one(request, endpoint) for endpoint in asked)))
            left = ("more holders were asked for than one answer is about",) * (len(request.holders) - len(asked))
            self._answer(Sighting(request.request, tuple(not t for t in (*trouble, *left)), (*trouble, *left)))

    def _looked(self, request: LookAtHolders, endpoint: HolderEndpoint) -> LookOutcome:
        """Seals and reads this very instance with the worker's own account."""
        holder = HolderClient(endpoint, self._job.job, account_of(self._job), self._job.holder_call_seconds)
        try:
            if not request.epoch:
                holder.manifests()
                return LookOutcome()
            holder.seal(request.epoch)
            manifests = holder.manifests()
            return LookOutcome(
                reading=_told(request, endpoint, manifests, _layouts(holder, manifests, request.layouts))
            )
        except Exception as error:  # noqa: BLE001  an answer in any case: who asked decides from it
            return LookOutcome(str(error) or type(error).__name__)
        finally:
            holder.close()


def _layouts(holder: HolderClient, manifests: tuple[RankManifest, ...], known: tuple[str, ...]) -> dict[str, str]:
    """Records that the operator lacks; one that cannot be read here may be read elsewhere."""
    found = dict[str, str]()
    for digest in sorted({manifest.layout for manifest in manifests} - set(known)):
        try:
            found[digest] = holder.read_layout(digest)
        except SurefootError as error:
            log.warning("layout %s of %s is not told: %s", digest, holder, error)
    return found


def _told(
    request: LookAtHolders, endpoint: HolderEndpoint, manifests: tuple[RankManifest, ...], layouts: dict[str, str]
) -> HolderReading | None:
    """As much as one message takes: a part of an index would be taken for all of it."""
    texts = tuple(manifest.to_json() for manifest in manifests)
    room = MOST_CHARACTERS - sum(map(len, texts))
    if room < 0:
        log.warning("%s has %d saves, more than can be told in one message", endpoint.holder, len(texts))
        metrics.fallbacks.labels("reading_too_large").inc()
        return None
    told = dict[str, str]()
    for digest, text in layouts.items():
        if len(text) <= room:
            told[digest], room = text, room - len(text)
    return HolderReading(request.request, endpoint.holder, texts, told)
