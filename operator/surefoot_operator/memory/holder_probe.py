"""Probes one holder: provisions, seals and reads its index; blocking.

Called by `memory.holder_monitor`, one visit at a time. Every call has its own time limit. TierUnavailable: the holder's
state is unknown for now; Fenced: a newer epoch owns it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from surefoot.errors import BeingFilled, ChunkMissing, Fenced, ProtocolError, TierError, TierUnavailable
from surefoot.holder import Credentials, HolderClient, HolderIndex
from surefoot.holder.provisioning import HolderAdmin, Memory
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, HolderId, RankSave
from surefoot.protocol.records import Layout, RankManifest
from surefoot_operator import metrics
from surefoot_operator.memory.holder_place import HolderPlace
from surefoot_operator.memory.quota import Terms, is_worth_measuring, overdraft
from surefoot_operator.settings import MemorySettings

log = logging.getLogger(__name__)

MEASURED_SECONDS = 0.5
"""A job's keys on a crowded holder are measured at most so often."""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """The purpose of a visit; `epoch` is that of status.world."""

    epoch: int
    claimed: bool
    seal: bool
    """Seal at `epoch` before reading: the order of a claim, or what a returning holder needs first."""
    read: bool


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a visit; `index` None: it was not read."""

    endpoint: HolderEndpoint
    fence: int
    index: HolderIndex | None
    memory: Memory | None = None
    """As of the index."""
    closed: str = ""
    """Why the job may not write there; empty: it may."""


class HolderProbe:
    """The operator's connections to one holder, for one thread at a time."""

    def __init__(self, place: HolderPlace, job: str, account: Credentials, settings: MemorySettings) -> None:
        self._place, self._job, self._account = place, job, account
        self._call_seconds, self._closures = settings.call_seconds, settings.closures
        self._admin = HolderAdmin(place.host, place.port, place.admin_password, settings.call_seconds, place.tls_ca)
        self._client: HolderClient | None = None
        self._renewed: HolderPlace | None = None
        self._fence = -1
        self._layouts: dict[str, Layout] = {}
        self._told: set[str] = set()
        self._closed, self._measured_at, self._closed_until = "", 0.0, 0.0
        self._closings = 0
        self._limits: tuple[int | None, int] = (None, 0)
        """The job's own and the server's, as the account was judged by last."""
        self.size_limit_bytes: int | None = None
        """`checkpoint.memory.sizeLimit`."""
        self.settling = False
        """Whether a server that is nobody's yet is left to its companion."""

    def run(self, request: ProbeRequest) -> ProbeResult:
        """Provisions a new instance, then carries out the request.

        After a failure the next visit looks everything up again.
        """
        self._take_up()
        try:
            run = self._admin.instance()
            if self._client is None or not self._client.endpoint.holder.instance.startswith(run):
                self._client = self._provision(self._admin.instance_of(self._job), request)
            return self._carry_out(self._client, request)
        except TierUnavailable:
            self._forget()
            raise

    def renew(self, place: HolderPlace) -> None:
        """Uses another password or authority from the next visit on.

        Any thread may call it; no connection is closed during a call.
        """
        self._renewed = place

    def _take_up(self) -> None:
        place, self._renewed = self._renewed, None
        if place is not None:
            self._admin.close()
            self._forget()
            self._place = place
            self._admin = HolderAdmin(place.host, place.port, place.admin_password, self._call_seconds, place.tls_ca)

    def _carry_out(self, client: HolderClient, request: ProbeRequest) -> ProbeResult:
        seal = request.seal or (not request.claimed and self._fence < request.epoch)
        if seal and self._fence < request.epoch:
            try:
                client.seal(request.epoch)
                self._fence = request.epoch
            except Fenced:
                self._fence = client.index().fence  # the plan must learn which epoch rules
        index = memory = None
        if seal or request.read:
            index, memory = client.index(), self._admin.memory()
            self._fence = max(self._fence, index.fence)
            self._note_damage(index.damaged)
            self._read_layouts(client, index.manifests)
            self._hold_to_its_part(memory)
        return ProbeResult(client.endpoint, self._fence, index, memory, self._closed)

    def _hold_to_its_part(self, memory: Memory) -> None:
        """Closes the job's account here while it holds more than its part, and opens it again."""
        now, limits = time.monotonic(), (self.size_limit_bytes, memory.limit_bytes)
        if limits != self._limits:
            # somebody gave it more, or less: what it did under other limits is no reason to wait
            self._limits, self._closings, self._closed_until, self._measured_at = limits, 0, now, 0.0
        if not self._account.user or now < max(self._closed_until, self._measured_at + MEASURED_SECONDS):
            return
        if not self._closed and not is_worth_measuring(memory, limits[0]):
            return
        self._measured_at = now
        holding = self._admin.holding(self._job)
        terms = Terms(holding.accounts(), limits[0])
        why = overdraft(holding.held_bytes(), memory, terms, bool(self._closed))
        if why and not self._closed:
            gone = holding.close(self._account)
            self._closings += 1
            self._closed_until = now + self._closures.seconds(self._closings)
            metrics.holder_accounts_closed.inc()
            log.warning("%s: closed the account of job %s: %s; removed %d keys", self._place.node, self._job, why, gone)
        elif self._closed and not why:
            holding.open(self._account)
            log.info("%s: opened the account of job %s again", self._place.node, self._job)
        self._closed = why

    def _forget(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client, self._fence, self._closed = None, -1, ""

    @property
    def layouts(self) -> dict[str, Layout]:
        """Every layout record read here so far, by digest."""
        return self._layouts

    def drop(self, holder: HolderId, saves: Iterable[tuple[RankSave, int]], epoch: int, due: Callable[[], bool]) -> int:
        """Drops (save, chunks) from exactly this instance; returns how many.

        It stops once `due` says no.
        """
        client, gone = self._of(holder), 0
        for save, chunks in saves:
            if not due():
                break
            client.drop(save, epoch, chunks)
            gone += 1
        return gone

    def mark(self, holder: HolderId, checkpoint: Checkpoint, epoch: int) -> None:
        """Writes the watermark to exactly this instance."""
        self._of(holder).set_watermark(checkpoint, epoch)

    def unindexed(self) -> dict[RankSave, tuple[str, ...]]:
        return self._admin.unindexed(self._job)

    def sweep(self, holder: HolderId, found: Mapping[RankSave, Sequence[str]], epoch: int) -> int:
        """Removes leftover keys of uncommitted saves; returns how many.

        From exactly this instance.
        """
        client = self._of(holder)
        return sum(len(names) for save, names in found.items() if client.sweep(save, epoch, names))

    def clean(self) -> None:
        """Removes the job from this holder: account first, then every key."""
        self._admin.remove_job(self._job, self._account.user)
        self._forget()

    def close(self) -> None:
        self._admin.close()
        self._forget()

    def _of(self, holder: HolderId) -> HolderClient:
        where = f"{self._place.host}:{self._place.port}"
        if self._client is None:
            raise TierUnavailable(f"{holder} does not answer at {where}")
        if self._client.endpoint.holder != holder:
            raise TierUnavailable(f"{holder} is gone: {self._client.endpoint.holder} answers at {where}")
        return self._client

    def _provision(self, instance: str, request: ProbeRequest) -> HolderClient:
        """Makes this instance the job's. One that a former leader provisioned keeps its fence while a claim waits for
        drains: sealing it here, before its time, would refuse saves that may still arrive."""
        self._forget()
        place = self._place
        tls = place.tls_ca is not None
        endpoint = HolderEndpoint(HolderId(place.node, instance), place.host, place.port, place.domain, tls)
        account = Credentials("", place.admin_password, place.tls_ca or "")
        client = HolderClient(endpoint, self._job, account, self._call_seconds)
        known = -1
        with contextlib.suppress(TierUnavailable):  # not this job's yet; a dead one is found by the next call
            known = client.index().fence
        if known < 0 and (self.settling or self._admin.is_being_filled()):
            client.close()
            raise BeingFilled(
                f"the memory of the holder on {place.node} is still being initialised; trying again", instance
            )
        fence = known if request.claimed and known >= 0 else max(known, request.epoch)
        self._admin.provision(self._job, self._account, fence)
        self._fence = fence
        return client

    def _read_layouts(self, client: HolderClient, manifests: Iterable[RankManifest]) -> None:
        """Fetches each layout once. One that is damaged here may be good elsewhere: named, counted, left out."""
        for digest in sorted({m.layout for m in manifests} - set(self._layouts)):
            try:
                text = client.read_layout(digest)
                if xxhash.xxh3_64_hexdigest(text.encode()) != digest:
                    raise ProtocolError("its bytes do not match its digest")
                self._layouts[digest] = Layout.from_json(text)
            except TierUnavailable:
                raise
            except (ChunkMissing, ProtocolError, TierError) as error:
                self._note_damage((f"{client}: layout {digest}: {error}",))

    def _note_damage(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._told:
                self._told.add(name)
                metrics.holder_damaged.inc()
                log.warning("damaged: %s; another copy is needed", name)
