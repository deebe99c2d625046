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

from surefoot.task_set import repeat_until_cancelled, wait_for_first
from surefoot_operator.controller.leader.election_rules import (
    LeaseTimings,
    ObservedShard,
    ShardLayout,
    handover_reason,
    lease_name,
    patience_seconds,
    shard_to_request,
)
from surefoot_operator.controller.leader.leader_election import ANNOTATION_PREFIX, Elector, LeaseLost, LeaseRef
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError

log = logging.getLogger(__name__)

SHARD_COUNT_ANNOTATION = f"{ANNOTATION_PREFIX}shards"
"""Annotation of shard 0's lease: the number of shards; without it there is one."""
DESIRED_COUNT_ANNOTATION = f"{ANNOTATION_PREFIX}shards-wanted"
"""Annotation of shard 0's lease: the number of shards that its leader is changing to."""
REQUESTED_BY_ANNOTATION = f"{ANNOTATION_PREFIX}asked-by"
"""Annotation of any shard's lease: the replica that requests the shard from its leader."""
REQUEST_INTERVAL_SECONDS = 5.0
"""Interval between two checks for an even spread; before the first one, new replicas take free shards."""
SHARD_COUNT_POLL_SECONDS = 0.2
"""Interval for checking whether the number of shards changes."""


class LeaderCallbacks(Protocol):
    """Starts and stops the work of a shard that this replica leads."""

    def start_leading(self, shard: int, shards: int, may_act: Callable[[], None]) -> None:
        """Leads the shard from now on.

        Args:
            shard: The shard.
            shards: Number of shards in force.
            may_act: Raises NotLeader once the shard's lease is over.
        """

    async def stop_leading(self, shard: int, has_lease: bool) -> None:
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
        self._desired_count, self._terms, self._timings = wished, terms, timings
        self._electors = {0: self._new_elector(0)}
        self._led: set[int] = set()
        self._end_tasks: set[asyncio.Task[None]] = set()
        self._written_count: int | None = None
        """Number of shards that is being written; None: none is."""
        self.shard_count = wished
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
            await self._compete_for_shards(self._stored_count())

    async def close(self) -> None:
        """Ends every term and releases its lease."""
        await asyncio.gather(*(self._end_term(shard, in_peace=True) for shard in sorted(self._led)), *self._end_tasks)
        await asyncio.gather(*(elector.release() for elector in self._electors.values()))

    # ---- one number of shards ---------------------------------------------------------------------------------------

    async def _compete_for_shards(self, shards: int) -> None:
        """Competes for this many shards until their number changes."""
        self.shard_count = shards
        for shard in range(shards):
            self._electors.setdefault(shard, self._new_elector(shard))
        tasks = [asyncio.create_task(self._lead_shard(shard), name=f"shard {shard}") for shard in range(shards)]
        tasks += [
            asyncio.create_task(self._request_shards(), name="ask"),
            asyncio.create_task(self._wait_for_count_change(), name="moved"),
        ]
        await wait_for_first(tasks)
        # Jobs move between shards now. End all terms first, so that no job has two leaders.
        await asyncio.gather(*(self._end_term(shard, in_peace=False) for shard in sorted(self._led)), *self._end_tasks)
        await self._change_shard_count()

    async def _wait_for_count_change(self) -> None:
        """Waits until the lease names another number of shards, or this replica may write one."""
        while True:
            if self._stored_count() != self.shard_count or self._may_change_count():
                return
            await asyncio.sleep(SHARD_COUNT_POLL_SECONDS)

    def _may_change_count(self) -> bool:
        gathered = all(self._electors[shard].leader_identity == self._identity for shard in range(self.shard_count))
        return self._desired_count != self.shard_count and gathered

    async def _change_shard_count(self) -> None:
        """Writes the desired number if this replica has all leases, then releases those of removed shards."""
        if self._may_change_count():
            self._written_count = self._desired_count
            try:
                await self._electors[0].renew()
                log.info(
                    "jobs are spread over %d shard(s) from now on, instead of %d", self._desired_count, self.shard_count
                )
            except (PlatformError, TimeoutError) as error:
                log.warning("cannot write the number of shards, reading whether it was written: %s", error)
                await self._electors[0].read()
            finally:
                self._written_count = None
        for shard in [shard for shard in self._electors if shard >= self._stored_count()]:
            await self._electors.pop(shard).release()

    async def _lead_shard(self, shard: int) -> None:
        """Leads one shard in term after term."""
        elector = self._electors[shard]
        while True:
            await elector.acquire(
                lambda: patience_seconds(self._identity, shard, self._observed_shards(), self._layout())
            )
            if not await self._is_count_unchanged(shard):
                # The number of shards changed before we got this lease.
                if shard != 0:
                    await elector.release()
                await asyncio.sleep(SHARD_COUNT_POLL_SECONDS)
                continue
            self._terms.start_leading(shard, self.shard_count, elector.require_leadership)
            self._led.add(shard)
            lease_lost: LeaseLost | None = None
            try:
                await elector.renew_until_lost(partial(self._must_hand_over, shard))
            except LeaseLost as error:
                lease_lost = error
            await self._end_term(shard, in_peace=elector.leading)
            if lease_lost is not None and not self._led:
                raise lease_lost
            if lease_lost is not None:
                log.warning("this replica no longer leads shard %d: %s", shard, lease_lost)
            if elector.leading:
                await elector.release()

    async def _end_term(self, shard: int, in_peace: bool) -> None:
        """Ends a term completely, even if the waiting task is cancelled."""
        self._led.discard(shard)
        ending = asyncio.create_task(self._terms.stop_leading(shard, in_peace), name=f"end shard {shard}")
        self._end_tasks.add(ending)
        ending.add_done_callback(self._end_tasks.discard)
        await asyncio.shield(ending)

    async def _is_count_unchanged(self, shard: int) -> bool:
        """Returns whether the number of shards is still the one that this lease was acquired for.

        Checked after the lease was acquired: a replica that changes the number needs all leases, and from now on cannot
        have this one.
        """
        if shard == 0:
            return self._stored_count() == self.shard_count
        try:
            lease_object = await self._api.get(self._where.path)
        except ApiError as error:
            return error.code == 404
        except PlatformError:
            return False
        return (
            _parse_count(lease_object["metadata"].get("annotations") or {}, SHARD_COUNT_ANNOTATION, 1)
            == self.shard_count
        )

    # ---- requests between replicas ----------------------------------------------------------------------------------

    async def _request_shards(self) -> None:
        """Requests shards from leaders with at least two more than this replica, until cancelled."""
        await repeat_until_cancelled(self._request_shard_once, REQUEST_INTERVAL_SECONDS)

    async def _request_shard_once(self) -> float:
        shard = shard_to_request(self._identity, self._observed_shards(), self._layout())
        if shard is not None:
            log.info("asking leader %s to hand over shard %d", self._electors[shard].leader_identity, shard)
            try:
                await self._electors[shard].add_annotations({REQUESTED_BY_ANNOTATION: self._identity})
            except (PlatformError, TimeoutError) as error:
                log.info("cannot ask for shard %d, retrying: %s", shard, error)
        return REQUEST_INTERVAL_SECONDS

    def _must_hand_over(self, shard: int) -> bool:
        reason = handover_reason(self._identity, shard, self._observed_shards(), self._layout())
        if reason:
            log.info("handing shard %d over: %s", shard, reason)
        return bool(reason)

    def _observed_shards(self) -> dict[int, ObservedShard]:
        observed_shards = {}
        for shard in range(self.shard_count):
            elector = self._electors[shard]
            is_ours = elector.leader_identity == self._identity
            # A shard that is being handed over no longer counts; otherwise one too many would be handed over with it.
            is_ending = is_ours and elector.leading and shard not in self._led and shard != 0
            observed_shards[shard] = ObservedShard(
                "" if is_ending else elector.leader_identity,
                (elector.annotations or {}).get(REQUESTED_BY_ANNOTATION, ""),
            )
        return observed_shards

    def _layout(self) -> ShardLayout:
        elector = self._electors[0]
        if elector.leader_identity == self._identity:
            return ShardLayout(self.shard_count, self._desired_count)
        return ShardLayout(
            self.shard_count, _parse_count(elector.annotations or {}, DESIRED_COUNT_ANNOTATION, self.shard_count)
        )

    def _stored_count(self) -> int:
        """Returns the number of shards in shard 0's lease; without a lease, as this replica last knew or wants it."""
        annotations = self._electors[0].annotations
        return self.shard_count if annotations is None else _parse_count(annotations, SHARD_COUNT_ANNOTATION, 1)

    def _new_elector(self, shard: int) -> Elector:
        lease = LeaseRef(self._where.namespace, lease_name(self._where.name, shard))
        return Elector(self._api, lease, self._identity, self._timings, notes=partial(self._lease_annotations, shard))

    def _lease_annotations(self, shard: int) -> dict[str, str]:
        notes = dict(self._terms.annotations(shard))
        if shard == 0:
            shards = self._written_count or self._stored_count()
            notes |= {SHARD_COUNT_ANNOTATION: str(shards)} if shards != 1 else {}
            notes |= {DESIRED_COUNT_ANNOTATION: str(self._desired_count)} if shards != self._desired_count else {}
        return notes


def _parse_count(notes: Mapping[str, str], name: str, default: int) -> int:
    text = notes.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else default
