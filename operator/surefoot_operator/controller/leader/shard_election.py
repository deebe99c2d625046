"""Competes for every shard's lease, and spreads the shards evenly over the replicas.

Touches the API server; run by the composition root. A job must have exactly one leader, also while an upgrade runs
replicas whose settings name different numbers of shards. So the number in force is in shard 0's lease, not in the
settings. To change it, the leader of shard 0 gathers the leases of all shards, writes the number, and releases them.
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
"""Annotation of shard 0's lease: the number of shards; without it there is one."""
REQUESTED_SHARD = f"{NOTE}shards-wanted"
"""Annotation of shard 0's lease: the number of shards that its leader is changing to."""
REQUESTED_BY = f"{NOTE}asked-by"
"""Annotation of any shard's lease: the replica that requests the shard from its leader."""
ASK_SECONDS = 5.0
"""Interval between two checks for an even spread; before the first one, new replicas take free shards."""
POLL_SECONDS = 0.2
"""Interval for checking whether the number of shards changes."""


class LeaderCallbacks(Protocol):
    """Starts and stops the work of a shard that this replica leads."""

    def started_leading(self, shard: int, shards: int, may_act: Callable[[], None]) -> None:
        """Leads the shard from now on.

        Args:
            shard: The shard.
            shards: Number of shards in force.
            may_act: Raises NotLeader once the shard's lease is over.
        """

    async def stopped_leading(self, shard: int, in_peace: bool) -> None:
        """Stops leading the shard.

        Args:
            shard: The shard.
            in_peace: Whether this replica still has the lease, and releases it next.
        """

    def annotations(self, shard: int) -> Mapping[str, str]:
        """Returns the annotations of the shard's lease, for other replicas."""


class ShardElection:
    """Competes for all shards as one replica: `run` until cancelled, then `close`.

    Args:
        api: The API server.
        where: Shard 0's lease.
        identity: Identity of this replica.
        wished: Number of shards in this replica's settings.
        terms: Starts and stops the work of each shard.
        timings: Durations of the elections; None: the defaults.
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
        """Number of shards that is being written; None: none is."""
        self.shards = wished
        """Number of shards as this replica knows; the number in force is in shard 0's lease."""

    @property
    def led_shards(self) -> frozenset[int]:
        """Shards that this replica leads."""
        return frozenset(self._led)

    def require_leadership(self, shard: int) -> None:
        """Raises NotLeader unless this shard's lease is ours by our own clock."""
        self._electors[shard].require_leadership()

    @property
    def last_answer_seconds(self) -> float:
        """When the API server last answered about a lease. Boot clock."""
        return max(elector.last_answer_seconds for elector in self._electors.values())

    def leader_and_annotations(self, shard: int) -> tuple[str, Mapping[str, str]]:
        """Returns the identity of a shard's leader (empty: none), and its lease's annotations."""
        elector = self._electors[shard]
        return elector.leader_identity, elector.annotations or {}

    async def run(self) -> None:
        """Leads the shards that it gets, until cancelled.

        Raises LeaseLost if another replica took the only shard that this one led.
        """
        await self._electors[0].read()
        while True:
            await self._compete_for_shards(self._recorded())

    async def close(self) -> None:
        """Ends every term and releases its lease."""
        await asyncio.gather(*(self._end(shard, in_peace=True) for shard in sorted(self._led)), *self._ending)
        await asyncio.gather(*(elector.release() for elector in self._electors.values()))

    # ---- one number of shards ---------------------------------------------------------------------------------------

    async def _compete_for_shards(self, shards: int) -> None:
        """Competes for this many shards until their number changes."""
        self.shards = shards
        for shard in range(shards):
            self._electors.setdefault(shard, self._elector(shard))
        tasks = [asyncio.create_task(self._compete(shard), name=f"shard {shard}") for shard in range(shards)]
        tasks += [asyncio.create_task(self._ask(), name="ask"), asyncio.create_task(self._moved(), name="moved")]
        await wait_for_first(tasks)
        # Jobs move between shards now. End all terms first, so that no job has two leaders.
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
        """Writes the desired number if this replica has all leases, then releases those of removed shards."""
        if self._may_cut():
            self._next = self._wished
            try:
                await self._electors[0].renew()
                log.info("jobs are spread over %d shard(s) from now on, instead of %d", self._wished, self.shards)
            except (PlatformError, TimeoutError) as error:
                log.warning("cannot write the number of shards, reading whether it was written: %s", error)
                await self._electors[0].read()
            finally:
                self._next = None
        for shard in [shard for shard in self._electors if shard >= self._recorded()]:
            await self._electors.pop(shard).release()

    async def _compete(self, shard: int) -> None:
        """Leads one shard in term after term."""
        elector = self._electors[shard]
        while True:
            await elector.acquire(
                lambda: patience_seconds(self._identity, shard, self._observed_shards(), self._layout())
            )
            if not await self._in_force(shard):
                # The number of shards changed before we got this lease.
                if shard != 0:
                    await elector.release()
                await asyncio.sleep(POLL_SECONDS)
                continue
            self._terms.started_leading(shard, self.shards, elector.require_leadership)
            self._led.add(shard)
            lease_lost: LeaseLost | None = None
            try:
                await elector.renew_until_lost(partial(self._gives_up, shard))
            except LeaseLost as error:
                lease_lost = error
            await self._end(shard, in_peace=elector.leading)
            if lease_lost is not None and not self._led:
                raise lease_lost
            if lease_lost is not None:
                log.warning("this replica no longer leads shard %d: %s", shard, lease_lost)
            if elector.leading:
                await elector.release()

    async def _end(self, shard: int, in_peace: bool) -> None:
        """Ends a term completely, even if the waiting task is cancelled."""
        self._led.discard(shard)
        ending = asyncio.create_task(self._terms.stopped_leading(shard, in_peace), name=f"end shard {shard}")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)

    async def _in_force(self, shard: int) -> bool:
        """Returns whether the number of shards is still the one that this lease was acquired for.

        Checked after the lease was acquired: a replica that changes the number needs all leases, and from now on cannot
        have this one.
        """
        if shard == 0:
            return self._recorded() == self.shards
        try:
            lease_object = await self._api.get(self._where.path)
        except ApiError as error:
            return error.code == 404
        except PlatformError:
            return False
        return _number(lease_object["metadata"].get("annotations") or {}, SHARDS, 1) == self.shards

    # ---- requests between replicas ----------------------------------------------------------------------------------

    async def _ask(self) -> None:
        """Requests shards from leaders with at least two more than this replica, until cancelled."""
        await repeat(self._ask_once, ASK_SECONDS)

    async def _ask_once(self) -> float:
        shard = shard_to_request(self._identity, self._observed_shards(), self._layout())
        if shard is not None:
            log.info("asking leader %s to hand over shard %d", self._electors[shard].leader_identity, shard)
            try:
                await self._electors[shard].annotate({REQUESTED_BY: self._identity})
            except (PlatformError, TimeoutError) as error:
                log.info("cannot ask for shard %d, retrying: %s", shard, error)
        return ASK_SECONDS

    def _gives_up(self, shard: int) -> bool:
        reason = handover_reason(self._identity, shard, self._observed_shards(), self._layout())
        if reason:
            log.info("handing shard %d over: %s", shard, reason)
        return bool(reason)

    def _observed_shards(self) -> dict[int, ObservedShard]:
        observed_shards = {}
        for shard in range(self.shards):
            elector = self._electors[shard]
            is_ours = elector.leader_identity == self._identity
            # A shard that is being handed over no longer counts; otherwise one too many would be handed over with it.
            is_ending = is_ours and elector.leading and shard not in self._led and shard != 0
            observed_shards[shard] = ObservedShard(
                "" if is_ending else elector.leader_identity, (elector.annotations or {}).get(REQUESTED_BY, "")
            )
        return observed_shards

    def _layout(self) -> ShardLayout:
        elector = self._electors[0]
        if elector.leader_identity == self._identity:
            return ShardLayout(self.shards, self._wished)
        return ShardLayout(self.shards, _number(elector.annotations or {}, REQUESTED_SHARD, self.shards))

    def _recorded(self) -> int:
        """Returns the number of shards in shard 0's lease; without a lease, as this replica last knew or wants it."""
        annotations = self._electors[0].annotations
        return self.shards if annotations is None else _number(annotations, SHARDS, 1)

    def _elector(self, shard: int) -> Elector:
        lease = LeaseRef(self._where.namespace, lease_name(self._where.name, shard))
        return Elector(self._api, lease, self._identity, self._timings, notes=partial(self._notes, shard))

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
