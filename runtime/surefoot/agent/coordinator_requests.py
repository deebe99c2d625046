"""Carries out the coordinator's requests, and collects garbage while no coordinator is reachable.

In threads, one at a time. Whoever asked asks again if no answer comes: a full queue drops the oldest request. Used by
`agent.agent_process`, on its loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from surefoot import metrics
from surefoot.agent.agent_state import AgentState
from surefoot.errors import ConfigurationError, SurefootError, TierError
from surefoot.flush.bandwidth import Bandwidth
from surefoot.flush.garbage_collection import (
    GcResult,
    GcScope,
    Survey,
    collect_garbage,
    layout_texts,
    retry_while_unavailable,
    survey_tier,
)
from surefoot.flush.uploader import Uploader, UploadOptions, UploadOutcome, drop_persistent, repair
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import account_of
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.retention import LossHistory
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerInstance, RankSave, SourceJob
from surefoot.protocol.messages import (
    Assign,
    DeletePersistent,
    DeleteReply,
    FromAgent,
    ListAllServers,
    ListPersistent,
    PersistentPage,
    RepairReply,
    RepairSave,
    UploadReply,
    UploadSave,
)
from surefoot.protocol.progress import Progress
from surefoot.settings import JobSettings, settings_elsewhere
from surefoot.tiers import ObjectStoreTier, Tier, open_persistent

_log = logging.getLogger(__name__)


# ---- unexpected errors -----------------------------------------------------------------------------------------------
# Counts and logs unforeseen errors in work beside the training. They cost that work, never the agent. An agent that
# ends takes its trainers along, and so a bug in a listing would end a training that makes progress. Used where chores
# are carried out; each kind is counted each time and logged once, with its traceback.


class UnexpectedErrors:
    """Remembers which errors were logged, by the work that failed."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, type[Exception]]] = set()

    def record(self, work: str, error: Exception) -> str:
        """Counts a caught error, logs the first of its kind, describes it."""
        metrics.fallbacks.labels(kind="chore_failed").inc()
        if (work, type(error)) not in self._logged:
            self._logged.add((work, type(error)))
            _log.error("%s failed in a way that was not foreseen; the agent goes on", work, exc_info=error)
        return f"{work} failed in an unexpected way: {type(error).__name__}: {error}"[:500]


# ---- coordinator requests --------------------------------------------------------------------------------------------

Request = ListPersistent | RepairSave | DeletePersistent
_QUEUE = 256
PAGE_BYTES = 1 << 20
"""Of the texts in one page of a listing: what the coordinator reads without a pause, far below what a message may be."""
_MAX_LEFT_OUT = 1000
_NO_TIER = "this job has no persistent tier: checkpoint.persistent is not set"


@dataclass(frozen=True, slots=True)
class SaveLocations:
    """Lists present `holders`, the local one first; `memory(holder)` opens one."""

    memory: Callable[[MemoryServerInstance], Tier]
    servers: Callable[[], Sequence[MemoryServerInstance]]
    is_partial: Callable[[], int] = lambda: 0
    """The epoch of which there are more holders than these; 0: these are all."""


class CoordinatorRequests:
    """`run` until cancelled, then `close`. Answers go to `answer`, on the loop."""

    def __init__(
        self,
        job: JobSettings,
        places: SaveLocations,
        answer: Callable[[FromAgent], None],
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self._job = job
        self._bandwidth = bandwidth or Bandwidth()
        self._places = places
        self._answer = answer
        self._queue: asyncio.Queue[Request] = asyncio.Queue(_QUEUE)
        self._uploader: Uploader | None = None
        self._partly_read: dict[RankSave, int] = {}
        """Saves that are looked for on some of the holders only, and the epoch that has more."""
        self._remembered: dict[SourceJob | None, Mapping[RankSave, RankManifest]] = {}
        """Manifests of the last listing of each folder: one that is still there is not read again."""
        self._begun = False
        """Whether this agent has found or made the persistent tier's folder."""
        self._may_begin = False
        """Whether an upload may make that folder, as the last wish for one said."""
        self._unexpected = UnexpectedErrors()
        self._loop = asyncio.get_running_loop()

    def ask(self, request: Request) -> None:
        """Queues a request; a full queue drops the oldest."""
        if self._queue.full():
            metrics.fallbacks.labels(kind="chore_dropped").inc()
            _log.warning("too many requests of the coordinator wait here: %s is dropped", self._queue.get_nowait())
        self._queue.put_nowait(request)

    def upload(self, message: UploadSave) -> None:
        """Uploads in the background; an answer a save."""
        if self._job.persistent is None:
            for save in message.saves:
                self._answer(UploadReply(save, error=_NO_TIER))
            return
        self._may_begin = message.begin
        if self._uploader is None:
            options = UploadOptions(pace=self._bandwidth.persistent)
            self._uploader = Uploader(self._sources, lambda: self._persistent(self._may_begin), self._uploaded, options)
        self._uploader.queue_upload(message.generation, message.saves)

    async def run(self) -> None:
        while True:
            request = await self._queue.get()
            for answer in await asyncio.to_thread(self._carry_out, request):
                self._answer(answer)
                await asyncio.sleep(0)  # pages are large: the line gets its turn between them

    async def close(self) -> None:
        """Calls off the promotion that runs; it can be done again elsewhere."""
        if self._uploader is not None:
            await asyncio.to_thread(self._uploader.close)

    # ---- in threads ---------------------------------------------------------------------------------------------

    def _carry_out(self, request: Request) -> Sequence[FromAgent]:
        try:
            match request:
                case ListPersistent():
                    return self._list(request)
                case RepairSave(number, epoch, save, source, target, told):
                    tiers = (self._memory(source, told), self._memory(target, told))
                    return (RepairReply(number, repair(save, *tiers, epoch, self._bandwidth.memory)),)
                case DeletePersistent(number, checkpoints):
                    return (DeleteReply(number, drop_persistent(self._persistent(False), checkpoints)),)
        except SurefootError as error:
            return (_failed(request, str(error)),)
        except Exception as error:  # noqa: BLE001  whatever it was, whoever asked is answered and the training goes on
            return (_failed(request, self._unexpected.record(type(request).__name__, error)),)

    def _memory(self, holder: MemoryServerInstance, told: Sequence[MemoryServerEndpoint]) -> Tier:
        """Opens a holder where the request says it answers, else where the assignment does."""
        endpoint = next((one for one in told if one.instance == holder), None)
        return self._places.memory(holder) if endpoint is None else self._client(endpoint)

    def _client(self, endpoint: MemoryServerEndpoint) -> MemoryServerClient:
        return MemoryServerClient(endpoint, self._job.job, account_of(self._job), self._job.memory_call_timeout_seconds)

    def _list(self, asked: ListPersistent) -> list[PersistentPage]:
        tier = self._persistent(asked.begin) if asked.source_job is None else self._older(asked.source_job)
        found, newest_epoch = Survey((), ()), 0
        try:
            if asked.manifests and asked.source_job is None:
                newest_epoch = _claim_epoch(tier, asked)
            if asked.manifests:
                found = survey_tier(tier, self._remembered.get(asked.source_job))
                self._remembered[asked.source_job] = {m.save: m for m in found.manifests}
            named = {m.layout for m in found.manifests}
            texts, lost = layout_texts(tier, named if asked.layouts is None else asked.layouts)
        finally:
            tier.close()
        pages = _paged(asked.request, replace(found, unread_records=(*found.unread_records, *lost)), texts)
        return [*pages[:-1], replace(pages[-1], newest_epoch=newest_epoch)]

    def _persistent(self, begin: bool) -> ObjectStoreTier:
        """Opens the job's tier; `begin`: nothing of the job was ever complete there, so a folder may be made."""
        if self._job.persistent is None:
            raise ConfigurationError(_NO_TIER)
        tier = open_persistent(self._job.persistent, self._job.job, begin=begin and not self._begun)
        self._begun |= begin
        if not begin:
            tier.expect()
        return tier

    def _older(self, older: SourceJob) -> ObjectStoreTier:
        return open_persistent(settings_elsewhere(self._job, older.uri), older.uid, read_only=True)

    def _sources(self, save: RankSave) -> list[Tier]:
        self._partly_read[save] = self._places.is_partial()
        holders = self._places.servers()
        if not holders:
            raise TierError(f"{save} cannot be read: no holder is known")
        return [self._places.memory(holder) for holder in holders]

    def _uploaded(self, done: UploadOutcome) -> None:
        epoch = self._partly_read.pop(done.save, 0)
        lacking = epoch if done.error is not None else 0
        # holders that were not asked may have a good copy: it is uploaded again once they were told of
        answer = UploadReply(done.save, done.error, done.bytes, done.seconds, done.unreadable and not lacking)
        words = (ListAllServers(lacking), answer) if lacking else (answer,)
        try:
            for word in words:
                self._loop.call_soon_threadsafe(functools.partial(self._answer, word))
        except RuntimeError:
            pass  # the agent has ended; whoever asked asks another one


def _claim_epoch(tier: ObjectStoreTier, asked: ListPersistent) -> int:
    """Claims the epoch that is asked for; returns the newest other epoch that the tier names.

    A tier that is full or read-only can still be listed, and a job restores from it: only the claim is missing then. No upload
    can use the number there either, and the next listing claims again.
    """
    try:
        return retry_while_unavailable(lambda: tier.newest_epoch(asked.claim_epoch, asked.claim_ticket))
    except TierError as error:
        _log.warning("epoch %d could not be claimed in the persistent tier: %s", asked.claim_epoch, error)
        return retry_while_unavailable(
            lambda: tier.newest_epoch(asked.claim_epoch, asked.claim_ticket, is_writable=False)
        )


def _paged(number: int, found: Survey, texts: Mapping[str, str]) -> list[PersistentPage]:
    """Everything that was read, in pages; what could not be is named, and takes nothing else along."""
    pages: list[tuple[list[str], dict[str, str]]] = [([], {})]
    room = PAGE_BYTES
    for digest, text in [*(("", m.to_json()) for m in found.manifests), *texts.items()]:
        if len(text) > room and any(pages[-1]):
            pages.append(([], {}))
            room = PAGE_BYTES
        room -= len(text)
        if digest:
            pages[-1][1][digest] = text
        else:
            pages[-1][0].append(text)
    answers = [
        PersistentPage(number, tuple(manifests), layouts, page=place, more=place < len(pages) - 1)
        for place, (manifests, layouts) in enumerate(pages)
    ]
    return [*answers[:-1], replace(answers[-1], unread_records=found.unread_records[:_MAX_LEFT_OUT])]


def _failed(request: Request, error: str) -> FromAgent:
    match request:
        case ListPersistent(number):
            return PersistentPage(number, error=error)
        case RepairSave(request=number):
            return RepairReply(number, error)
        case DeletePersistent(number):
            return DeleteReply(number, error)


# ---- without a leader ------------------------------------------------------------------------------------------------
# Collects garbage in the memory tier while no coordinator reaches it. The rules are those of
# `flush.garbage_collection`. One agent of the epoch is enough, and every agent knows which: the one with the lowest
# place.

DISCONNECTED_SECONDS = 30.0
"""How long the coordinator must be away: a restarted one takes its work up again long before."""
ROUND_SECONDS = 10.0


def generation_to_collect(state: AgentState, away_seconds: float) -> Assign | None:
    """The epoch that this agent must look after now, if it must.

    `away_seconds`: how long no coordinator was heard, or said that it reaches no holder.
    """
    assign = state.assign
    if assign is None or assign.group_rank != 0 or not knows_all(assign) or away_seconds < DISCONNECTED_SECONDS:
        return None
    runs = state.alive and not state.killing and state.started == state.claimed == assign.generation
    return assign if runs else None


def knows_all(assign: Assign) -> bool:
    """Whether the assignment names every holder.

    Of some alone nobody can tell what is superseded.
    """
    return not assign.is_partial


def sound_steps(progress: Progress, later_steps: int) -> LossHistory | None:
    """Says what the steps of this worker show of all ranks'.

    Another rank may still be in the step that the own ranks have finished, as its collective is behind them all; every rank has
    finished the one before.
    """
    return LossHistory(max(0, progress.step - 1), progress.anomaly_step, later_steps) if later_steps else None


def collect_garbage_once(assign: Assign, job: JobSettings, progress: Progress) -> GcResult:
    """Collects garbage once on this epoch's holders (blocks: in a thread).

    `progress` of the own ranks: those of other workers nobody tells without a coordinator, and they step together.
    """
    account = account_of(job)
    clients = {
        endpoint.instance: MemoryServerClient(endpoint, job.job, account, job.memory_call_timeout_seconds)
        for endpoint in assign.servers
    }
    charge = GcScope(
        lineage=tuple(LineageEntry(epoch, parent, size) for epoch, parent, size in assign.lineage),
        generation=assign.generation,
        replicas=job.replicas,
        keep=job.keep,
        domains={endpoint.instance: endpoint.domain for endpoint in assign.servers},
        sound=sound_steps(progress, job.good_after_steps),
    )
    try:
        return collect_garbage(clients, charge)
    finally:
        for client in clients.values():
            client.close()


class LeaderlessCollector:
    """Collects garbage in rounds while this agent is in charge.

    `away_seconds`: how long no coordinator was heard. One that is heard and reaches no holder itself counts as away, too.
    """

    def __init__(
        self,
        job: JobSettings,
        state: Callable[[], AgentState],
        away_seconds: Callable[[], float],
        unexpected: UnexpectedErrors,
    ) -> None:
        self._job, self._state, self._away_seconds, self._unexpected = job, state, away_seconds, unexpected
        self._unreachable_since_seconds: float | None = None

    async def run(self) -> None:
        """Looks every ten seconds, until cancelled."""
        while True:
            await asyncio.sleep(ROUND_SECONDS)
            assign = generation_to_collect(self._state(), self._alone_seconds(time.monotonic()))
            if assign is not None:
                await self._collect(assign)

    def _alone_seconds(self, now: float) -> float:
        assign = self._state().assign
        unseen = assign is not None and assign.servers_unreachable
        self._unreachable_since_seconds = (self._unreachable_since_seconds or now) if unseen else None
        return max(
            self._away_seconds(),
            now - self._unreachable_since_seconds if self._unreachable_since_seconds is not None else 0.0,
        )

    async def _collect(self, assign: Assign) -> None:
        try:
            kept = await asyncio.to_thread(collect_garbage_once, assign, self._job, self._state().progress)
        except Exception as error:  # noqa: BLE001  the next round may do better
            self._unexpected.record("looking after the memory tier", error)
            return
        _log.info(
            "no coordinator reaches the holders: this agent moved the watermark to %s and dropped %d old saves from the holders",
            kept.watermark,
            kept.dropped,
            extra={"generation": assign.generation},
        )
        for problem in kept.problems:
            _log.warning("no coordinator reaches the holders, and one failed during garbage collection: %s", problem)
