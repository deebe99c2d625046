"""Competes for every shard's lease, and keeps shards evenly spread.

Touches the API server; run by the composition root. How many shards there are stands in shard 0's lease, and not in
anybody's settings: while a release is changed replicas of both settings run, and a job must have one leader. Who leads
shard 0 and wants another number gathers all shards, writes the number, and lets go of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from surefoot.task_set import repeat, wait_for_first
from surefoot_operator.controller.leader.election_rules import (
    LeaseTimings,
    ObservedShard,
    ShardLayout,
    handover_reason,
    lease_name,
    patience_seconds,
    shard_to_request,
)
from surefoot_operator.controller.leader.leader_election import NOTE, Elector, LeaseLost, LeaseRef
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError

log = logging.getLogger(__name__)

SHARDS = f"{NOTE}shards"
"""On shard 0's lease: how many there are; without it there is one."""
REQUESTED_SHARD = f"{NOTE}shards-wanted"
"""On shard 0's lease: how many whoever leads it gathers them for."""
REQUESTED_BY = f"{NOTE}asked-by"
"""On any shard's lease: who asks its holder for it."""
ASK_SECONDS = 5.0
"""Between two looks whether shards are spread evenly: replicas that have just begun take what is free first."""
POLL_SECONDS = 0.2


class LeaderCallbacks(Protocol):
    """What is done with a shard that this replica leads."""

    def started_leading(self, shard: int, shards: int, may_act: Callable[[], None]) -> None:
        """Leads the shard from now on.

        `may_act` raises NotLeading once its lease is over.
        """

    async def stopped_leading(self, shard: int, in_peace: bool) -> None:
        """Leads it no more.

        `in_peace`: the lease is held still, and is given up next.
        """

    def annotations(self, shard: int) -> Mapping[str, str]:
        """Annotations of its lease, for other replicas."""


class ShardElection:
    """Competes as one replica: `run` until cancelled, then `close`.

    Args:
        where: Shard 0's lease.
        wished: How many shards this replica is set to have.
    """

    def __init__(
        self,
        api: Api,
        where: LeaseRef,
        identity: str,
        wished: int,
        terms: LeaderCallbacks,
        timings: LeaseTimings | None = None,
    ) -> None:
        self._api, self._where, self._identity = api, where, identity
        self._wished, self._terms, self._timings = wished, terms, timings
        self._electors = {0: self._elector(0)}
        self._led: set[int] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._next: int | None = None
        """How many shards there will be, while that is being written."""
        self.shards = wished
        """As this replica knows; what is in force stands in the lease."""

    @property
    def led_shards(self) -> frozenset[int]:
        """Shards whose terms run here."""
        return frozenset(self._led)

    def require_leadership(self, shard: int) -> None:
        """Raises NotLeading unless this shard's lease is ours by our own clock."""
        self._electors[shard].require_leadership()

    @property
    def last_answer_seconds(self) -> float:
        """When the API server last answered about a lease."""
        return max(elector.last_answer_seconds for elector in self._electors.values())

    def leader_and_annotations(self, shard: int) -> tuple[str, Mapping[str, str]]:
        """Returns who leads a shard, and its lease's annotations."""
        elector = self._electors[shard]
        return elector.leader_identity, elector.annotations or {}

    async def run(self) -> None:
        """Leads what it gets, until cancelled.

        Raises LeaseLost where another took the only shard that this replica led.
        """
        await self._electors[0].read()
        while True:
            await self._compete_for_shards(self._recorded())

    async def close(self) -> None:
        """Ends every term and gives its lease back."""
        await asyncio.gather(*(self._end(shard, in_peace=True) for shard in sorted(self._led)), *self._ending)
        await asyncio.gather(*(elector.release() for elector in self._electors.values()))

    # ---- one layout -------------------------------------------------------------------------------------------------

    async def _compete_for_shards(self, shards: int) -> None:
        """Competes for so many shards until there are to be others."""
        self.shards = shards
        for shard in range(shards):
            self._electors.setdefault(shard, self._elector(shard))
        tasks = [asyncio.create_task(self._compete(shard), name=f"shard {shard}") for shard in range(shards)]
        tasks += [asyncio.create_task(self._ask(), name="ask"), asyncio.create_task(self._moved(), name="moved")]
        await wait_for_first(tasks)
        # the jobs are cut anew: none is led by two while that is written
        await asyncio.gather(*(self._end(shard, in_peace=False) for shard in sorted(self._led)), *self._ending)
        await self._change_shard_count()

    async def _moved(self) -> None:
        """Waits until the lease names another number of shards, or this replica may write one."""
        while True:
            if self._recorded() != self.shards or self._may_cut():
                return
            await asyncio.sleep(POLL_SECONDS)

    def _may_cut(self) -> bool:
        gathered = all(self._electors[shard].leader_identity == self._identity for shard in range(self.shards))
        return self._wished != self.shards and gathered

    async def _change_shard_count(self) -> None:
        """Writes how many shards there are to be, where this replica holds them all; then gives up those that are no more."""
        if self._may_cut():
            self._next = self._wished
            try:
                await self._electors[0].renew()
                log.info("jobs are spread over %d shard(s) from now on, instead of %d", self._wished, self.shards)
            except (PlatformError, TimeoutError) as error:
                log.warning("cannot say how many shards there are, looking whether it was written: %s", error)
                await self._electors[0].read()
            finally:
                self._next = None
        for shard in [shard for shard in self._electors if shard >= self._recorded()]:
            await self._electors.pop(shard).release()

    async def _compete(self, shard: int) -> None:
        """Leads one shard, term after term."""
        elector = self._electors[shard]
        while True:
            await elector.acquire(
                lambda: patience_seconds(self._identity, shard, self._observed_shards(), self._layout())
            )
            if not await self._in_force(shard):
                if shard != 0:
                    await elector.release()
                await asyncio.sleep(POLL_SECONDS)
                continue
            self._terms.started_leading(shard, self.shards, elector.require_leadership)
            self._led.add(shard)
            lost: LeaseLost | None = None
            try:
                await elector.renew_until_lost(partial(self._gives_up, shard))
            except LeaseLost as error:
                lost = error
            await self._end(shard, in_peace=elector.leading)
            if lost is not None and not self._led:
                raise lost
            if lost is not None:
                log.warning("shard %d is not led here any more: %s", shard, lost)
            if elector.leading:
                await elector.release()

    async def _end(self, shard: int, in_peace: bool) -> None:
        """Whoever waits for it may be cancelled; a term is ended whole."""
        self._led.discard(shard)
        ending = asyncio.create_task(self._terms.stopped_leading(shard, in_peace), name=f"end shard {shard}")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)

    async def _in_force(self, shard: int) -> bool:
        """Whether there are still as many shards as this lease was taken for.

        Asked after it was taken: who cuts the jobs anew holds all leases, and from here on not this one.
        """
        if shard == 0:
            return self._recorded() == self.shards
        try:
            found = await self._api.get(self._where.path)
        except ApiError as error:
            return error.code == 404
        except PlatformError:
            return False
        return _number(found["metadata"].get("annotations") or {}, SHARDS, 1) == self.shards

    # ---- among replicas ---------------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        """Asks whoever leads two shards more than this replica for one of them."""
        await repeat(self._ask_once, ASK_SECONDS)

    async def _ask_once(self) -> float:
        shard = shard_to_request(self._identity, self._observed_shards(), self._layout())
        if shard is not None:
            log.info("asking %s for shard %d", self._electors[shard].leader_identity, shard)
            try:
                await self._electors[shard].annotate({REQUESTED_BY: self._identity})
            except (PlatformError, TimeoutError) as error:
                log.info("could not ask for shard %d, asking again: %s", shard, error)
        return ASK_SECONDS

    def _gives_up(self, shard: int) -> bool:
        why = handover_reason(self._identity, shard, self._observed_shards(), self._layout())
        if why:
            log.info("handing shard %d over: %s", shard, why)
        return bool(why)

    def _observed_shards(self) -> dict[int, ObservedShard]:
        found = {}
        for shard in range(self.shards):
            elector = self._electors[shard]
            ours = elector.leader_identity == self._identity
            # what is being given up counts no more, or one too many would go with it
            gone = ours and elector.leading and shard not in self._led and shard != 0
            found[shard] = ObservedShard(
                "" if gone else elector.leader_identity, (elector.annotations or {}).get(REQUESTED_BY, "")
            )
        return found

    def _layout(self) -> ShardLayout:
        first = self._electors[0]
        if first.leader_identity == self._identity:
            return ShardLayout(self.shards, self._wished)
        return ShardLayout(self.shards, _number(first.annotations or {}, REQUESTED_SHARD, self.shards))

    def _recorded(self) -> int:
        """How many shards there are by shard 0's lease; where there is none, as this replica last knew or wishes."""
        noted = self._electors[0].annotations
        return self.shards if noted is None else _number(noted, SHARDS, 1)

    def _elector(self, shard: int) -> Elector:
        where = LeaseRef(self._where.namespace, lease_name(self._where.name, shard))
        return Elector(self._api, where, self._identity, self._timings, notes=partial(self._notes, shard))

    def _notes(self, shard: int) -> dict[str, str]:
        notes = dict(self._terms.annotations(shard))
        if shard == 0:
            shards = self._next or self._recorded()
            notes |= {SHARDS: str(shards)} if shards != 1 else {}
            notes |= {REQUESTED_SHARD: str(self._wished)} if shards != self._wished else {}
        return notes


def _number(notes: Mapping[str, str], name: str, default: int) -> int:
    text = notes.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else default
