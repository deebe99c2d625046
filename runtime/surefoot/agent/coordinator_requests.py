"""Carries out the coordinator's requests, and collects garbage while no coordinator is reachable.

Requests run in threads, one at a time. A full queue drops the oldest request: the coordinator repeats what gets no
reply. `agent.agent_process` uses it on its loop.
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
    read_layout_texts,
    retry_while_unavailable,
    survey_tier,
)
from surefoot.flush.uploader import Uploader, UploadOptions, UploadOutcome, drop_checkpoints, repair_save
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import worker_credentials
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
from surefoot.settings import JobSettings, persistent_settings_at
from surefoot.tiers import ObjectStoreTier, Tier, open_persistent

_log = logging.getLogger(__name__)


# ---- unexpected errors -----------------------------------------------------------------------------------------------
# Counts and logs unexpected errors in background work. Such an error fails that work, never the agent: an agent that ends
# takes its trainers with it, so a bug in a listing would end a healthy training run. Each error is counted; each kind is
# logged once, with its traceback.


class UnexpectedErrors:
    """Remembers which errors were logged, by the work that failed."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, type[Exception]]] = set()

    def record(self, work: str, error: Exception) -> str:
        """Counts a caught error, logs the first of its kind and returns a description of it."""
        metrics.fallbacks.labels(kind="chore_failed").inc()
        if (work, type(error)) not in self._logged:
            self._logged.add((work, type(error)))
            _log.error("%s failed with an unexpected error; the agent continues", work, exc_info=error)
        return f"{work} failed in an unexpected way: {type(error).__name__}: {error}"[:500]


# ---- coordinator requests --------------------------------------------------------------------------------------------

Request = ListPersistent | RepairSave | DeletePersistent
_MAX_QUEUED = 256
PAGE_BYTES = 1 << 20
"""Most text in one page of a listing: the coordinator parses it without blocking its loop; a message may be far larger."""
_MAX_UNREAD_RECORDS = 1000
_NO_TIER = "this job has no persistent tier: checkpoint.persistent is not set"


@dataclass(frozen=True, slots=True)
class SaveLocations:
    """Gives access to the memory servers of this generation."""

    open_server: Callable[[MemoryServerInstance], Tier]
    """Opens a connection to one memory server."""
    list_servers: Callable[[], Sequence[MemoryServerInstance]]
    """Lists the known memory servers, this worker's targets first."""
    partial_generation: Callable[[], int] = lambda: 0
    """Returns the generation whose list of memory servers is incomplete here; 0: the list is complete."""


class CoordinatorRequests:
    """Queues the coordinator's requests and carries them out: `run` until cancelled, then `close`.

    Replies are sent with `send`, on the loop.
    """

    def __init__(
        self,
        job: JobSettings,
        locations: SaveLocations,
        send: Callable[[FromAgent], None],
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self._job = job
        self._bandwidth = bandwidth or Bandwidth()
        self._places = locations
        self._send = send
        self._queue: asyncio.Queue[Request] = asyncio.Queue(_MAX_QUEUED)
        self._uploader: Uploader | None = None
        self._partial_generations: dict[RankSave, int] = {}
        """Saves that are being uploaded from an incomplete list of memory servers, with that list's generation."""
        self._manifests_by_job: dict[SourceJob | None, Mapping[RankSave, RankManifest]] = {}
        """Manifests of the last listing of each folder, so that unchanged ones are not read again. None: this job."""
        self._has_folder = False
        """Whether this agent has found or created the job's folder in the persistent tier."""
        self._may_create_folder = False
        """Whether an upload may create that folder, according to the newest upload request."""
        self._unexpected = UnexpectedErrors()
        self._loop = asyncio.get_running_loop()

    def queue_request(self, request: Request) -> None:
        """Queues a request; a full queue drops its oldest one."""
        if self._queue.full():
            metrics.fallbacks.labels(kind="chore_dropped").inc()
            _log.warning(
                "dropped %s: more than %d requests of the coordinator are queued", self._queue.get_nowait(), _MAX_QUEUED
            )
        self._queue.put_nowait(request)

    def queue_uploads(self, message: UploadSave) -> None:
        """Uploads the saves in the background and sends one reply for each."""
        if self._job.persistent is None:
            for save in message.saves:
                self._send(UploadReply(save, error=_NO_TIER))
            return
        self._may_create_folder = message.begin
        if self._uploader is None:
            options = UploadOptions(rate_limit=self._bandwidth.persistent)
            self._uploader = Uploader(
                self._open_sources, lambda: self._open_persistent(self._may_create_folder), self._on_uploaded, options
            )
        self._uploader.queue_upload(message.generation, message.saves)

    async def run(self) -> None:
        while True:
            request = await self._queue.get()
            for answer in await asyncio.to_thread(self._execute, request):
                self._send(answer)
                await asyncio.sleep(0)  # pages are large: let heartbeats out between them

    async def close(self) -> None:
        """Cancels the running upload; another agent can repeat it."""
        if self._uploader is not None:
            await asyncio.to_thread(self._uploader.close)

    # ---- in threads ---------------------------------------------------------------------------------------------

    def _execute(self, request: Request) -> Sequence[FromAgent]:
        try:
            match request:
                case ListPersistent():
                    return self._list_persistent(request)
                case RepairSave(request_id, generation, save, source, target, endpoints):
                    tiers = (self._open_server(source, endpoints), self._open_server(target, endpoints))
                    return (RepairReply(request_id, repair_save(save, *tiers, generation, self._bandwidth.memory)),)
                case DeletePersistent(request_id, checkpoints):
                    return (DeleteReply(request_id, drop_checkpoints(self._open_persistent(False), checkpoints)),)
        except SurefootError as error:
            return (_error_reply(request, str(error)),)
        except Exception as error:  # noqa: BLE001  the coordinator must get a reply, and the training must continue
            return (_error_reply(request, self._unexpected.record(type(request).__name__, error)),)

    def _open_server(self, instance: MemoryServerInstance, endpoints: Sequence[MemoryServerEndpoint]) -> Tier:
        """Opens a memory server at its address in the request, or else at that in the assignment."""
        endpoint = next((candidate for candidate in endpoints if candidate.instance == instance), None)
        return self._places.open_server(instance) if endpoint is None else self._connect(endpoint)

    def _connect(self, endpoint: MemoryServerEndpoint) -> MemoryServerClient:
        return MemoryServerClient(
            endpoint, self._job.job, worker_credentials(self._job), self._job.memory_call_timeout_seconds
        )

    def _list_persistent(self, request: ListPersistent) -> list[PersistentPage]:
        tier = (
            self._open_persistent(request.begin)
            if request.source_job is None
            else self._open_source_job(request.source_job)
        )
        survey, newest_generation = Survey((), ()), 0
        try:
            if request.manifests and request.source_job is None:
                newest_generation = _claim_generation(tier, request)
            if request.manifests:
                survey = survey_tier(tier, self._manifests_by_job.get(request.source_job))
                self._manifests_by_job[request.source_job] = {m.save: m for m in survey.manifests}
            layout_digests = {m.layout for m in survey.manifests}
            texts, unread_layouts = read_layout_texts(
                tier, layout_digests if request.layouts is None else request.layouts
            )
        finally:
            tier.close()
        pages = _split_into_pages(
            request.request, replace(survey, unread_records=(*survey.unread_records, *unread_layouts)), texts
        )
        return [*pages[:-1], replace(pages[-1], newest_generation=newest_generation)]

    def _open_persistent(self, may_create: bool) -> ObjectStoreTier:
        """Opens the job's persistent tier.

        `may_create`: no checkpoint of the job was ever complete there, so its folder may be created.
        """
        if self._job.persistent is None:
            raise ConfigurationError(_NO_TIER)
        tier = open_persistent(self._job.persistent, self._job.job, create_root=may_create and not self._has_folder)
        self._has_folder |= may_create
        if not may_create:
            tier.check_folder_exists()
        return tier

    def _open_source_job(self, source_job: SourceJob) -> ObjectStoreTier:
        return open_persistent(persistent_settings_at(self._job, source_job.uri), source_job.uid, read_only=True)

    def _open_sources(self, save: RankSave) -> list[Tier]:
        self._partial_generations[save] = self._places.partial_generation()
        servers = self._places.list_servers()
        if not servers:
            raise TierError(f"{save} cannot be read: this agent knows no memory server of its generation")
        return [self._places.open_server(server) for server in servers]

    def _on_uploaded(self, outcome: UploadOutcome) -> None:
        generation = self._partial_generations.pop(outcome.save, 0)
        unlisted_generation = generation if outcome.error is not None else 0
        # a server missing from the list may have a good copy: request the complete list before the save is retried
        reply = UploadReply(
            outcome.save,
            outcome.error,
            outcome.sent_bytes,
            outcome.seconds,
            outcome.is_unreadable and not unlisted_generation,
        )
        messages = (ListAllServers(unlisted_generation), reply) if unlisted_generation else (reply,)
        try:
            for message in messages:
                self._loop.call_soon_threadsafe(functools.partial(self._send, message))
        except RuntimeError:
            pass  # the agent has ended; the coordinator asks another one


def _claim_generation(tier: ObjectStoreTier, request: ListPersistent) -> int:
    """Claims the requested generation in the persistent tier; returns the newest other generation recorded there.

    A full or read-only tier can still be listed and restored from; only the claim is missing then. No upload can use the
    number there either, and the next listing claims again.
    """
    try:
        return retry_while_unavailable(
            lambda: tier.claim_and_find_newest_generation(request.claim_generation, request.claim_ticket)
        )
    except TierError as error:
        _log.warning(
            "generation %d could not be claimed in the persistent tier; the next listing tries again: %s",
            request.claim_generation,
            error,
        )
        return retry_while_unavailable(
            lambda: tier.claim_and_find_newest_generation(
                request.claim_generation, request.claim_ticket, is_writable=False
            )
        )


def _split_into_pages(request_id: int, survey: Survey, texts: Mapping[str, str]) -> list[PersistentPage]:
    """Splits a listing into pages of at most PAGE_BYTES; the last one names the records that could not be read."""
    pages: list[tuple[list[str], dict[str, str]]] = [([], {})]
    free_page_bytes = PAGE_BYTES
    for digest, text in [*(("", m.to_json()) for m in survey.manifests), *texts.items()]:
        if len(text) > free_page_bytes and any(pages[-1]):
            pages.append(([], {}))
            free_page_bytes = PAGE_BYTES
        free_page_bytes -= len(text)
        if digest:
            pages[-1][1][digest] = text
        else:
            pages[-1][0].append(text)
    answer_pages = [
        PersistentPage(request_id, tuple(manifests), layouts, page=index, more=index < len(pages) - 1)
        for index, (manifests, layouts) in enumerate(pages)
    ]
    return [*answer_pages[:-1], replace(answer_pages[-1], unread_records=survey.unread_records[:_MAX_UNREAD_RECORDS])]


def _error_reply(request: Request, error: str) -> FromAgent:
    match request:
        case ListPersistent(request_id):
            return PersistentPage(request_id, error=error)
        case RepairSave(request=request_id):
            return RepairReply(request_id, error)
        case DeletePersistent(request_id):
            return DeleteReply(request_id, error)


# ---- without a leader ------------------------------------------------------------------------------------------------
# Collects garbage in the memory tier while no coordinator reaches it, by the rules of `flush.garbage_collection`. One
# agent of the generation is enough, and every agent knows which: the one with group rank 0.

DISCONNECTED_SECONDS = 30.0
"""How long the coordinator must be unreachable first; a restarted one is back long before."""
GC_INTERVAL_SECONDS = 10.0


def generation_to_collect(state: AgentState, away_seconds: float) -> Assign | None:
    """Returns the assignment whose garbage this agent must collect now; None: it must not.

    `away_seconds`: how long no coordinator was connected, or the connected one reached no memory server.
    """
    assign = state.assign
    if assign is None or assign.group_rank != 0 or not knows_all_servers(assign) or away_seconds < DISCONNECTED_SECONDS:
        return None
    trains_newest = (
        state.has_running_trainers
        and not state.killing
        and state.started_generation == state.claimed_generation == assign.generation
    )
    return assign if trains_newest else None


def knows_all_servers(assign: Assign) -> bool:
    """Whether the assignment names every memory server; with only some of them, superseded saves cannot be identified."""
    return not assign.is_partial


def loss_history_of(progress: Progress, later_steps: int) -> LossHistory | None:
    """Derives the loss history of all ranks from this worker's progress; None: `later_steps` is 0, so nothing is judged.

    Another rank may still be in the step that this worker has finished, since its collective is done; but every rank has
    finished the step before.
    """
    return LossHistory(max(0, progress.step - 1), progress.anomaly_step, later_steps) if later_steps else None


def collect_garbage_once(assign: Assign, job: JobSettings, progress: Progress) -> GcResult:
    """Collects garbage once on this generation's memory servers; blocks, so call it in a thread.

    `progress` is that of this worker's ranks: without a coordinator that of others is unknown, and all step together.
    """
    account = worker_credentials(job)
    clients = {
        endpoint.instance: MemoryServerClient(endpoint, job.job, account, job.memory_call_timeout_seconds)
        for endpoint in assign.servers
    }
    scope = GcScope(
        lineage=tuple(LineageEntry(generation, parent, size) for generation, parent, size in assign.lineage),
        generation=assign.generation,
        replicas=job.replicas,
        keep=job.keep,
        domains={endpoint.instance: endpoint.domain for endpoint in assign.servers},
        loss_history=loss_history_of(progress, job.good_after_steps),
    )
    try:
        return collect_garbage(clients, scope)
    finally:
        for client in clients.values():
            client.close()


class LeaderlessCollector:
    """Collects garbage periodically while this agent is the GC owner.

    `away_seconds`: how long no coordinator is connected. One that reaches no memory server itself counts as away, too.
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
        """Checks every ten seconds whether this agent must collect garbage, and does so, until cancelled."""
        while True:
            await asyncio.sleep(GC_INTERVAL_SECONDS)
            assign = generation_to_collect(self._state(), self._unmanaged_seconds(time.monotonic()))
            if assign is not None:
                await self._collect(assign)

    def _unmanaged_seconds(self, now: float) -> float:
        assign = self._state().assign
        servers_unreachable = assign is not None and assign.servers_unreachable
        self._unreachable_since_seconds = (self._unreachable_since_seconds or now) if servers_unreachable else None
        return max(
            self._away_seconds(),
            now - self._unreachable_since_seconds if self._unreachable_since_seconds is not None else 0.0,
        )

    async def _collect(self, assign: Assign) -> None:
        try:
            result = await asyncio.to_thread(collect_garbage_once, assign, self._job, self._state().progress)
        except Exception as error:  # noqa: BLE001  the next attempt may succeed
            self._unexpected.record("garbage collection in the memory tier", error)
            return
        _log.info(
            "no coordinator reaches the memory servers: this agent moved the watermark to %s and deleted %d old saves",
            result.watermark,
            result.dropped_count,
            extra={"generation": assign.generation},
        )
        for problem in result.problems:
            _log.warning("garbage collection without a coordinator failed on a memory server: %s", problem)
