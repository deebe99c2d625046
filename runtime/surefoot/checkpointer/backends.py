"""Selects the save backend: the agent, or a drain in this process.

Called by `checkpointer` once. With SUREFOOT_AGENT_SOCKET set an agent started this program; otherwise the script's own
options and SUREFOOT_PERSISTENT_* say where checkpoints go.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.checkpointer.library_mode import library
from surefoot.checkpointer.library_mode.end_signal import EndSignal, grace_seconds
from surefoot.checkpointer.library_mode.in_process_backend import PERSISTENT, InProcessBackend, InProcessTargets
from surefoot.checkpointer.library_mode.library import RestoreAgreement
from surefoot.checkpointer.library_mode.other_writers import WriterWatch
from surefoot.checkpointer.library_mode.run_identity import changed_folder_hint, default_folder
from surefoot.checkpointer.process_group import current_process_group, decide_on_rank_zero
from surefoot.errors import ConfigurationError, OtherWriter
from surefoot.flush.garbage_collection import RetentionThread
from surefoot.ipc.save_backend import SaveBackend
from surefoot.ipc.trainer_messages import Attached
from surefoot.memory_server.connection import worker_credentials
from surefoot.protocol.checkpoints.completeness import Lineage, LineageEntry
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint
from surefoot.restore.catalogue import FurtherSources, SaveSource, persistent_source, server_sources, source_job_source
from surefoot.settings import JobSettings, job_settings, persistent_settings_at
from surefoot.tiers.persistent import ObjectStoreTier, open_persistent

_OWN_FOLDER = "surefoot-checkpoints"
_log = logging.getLogger(__name__)

LIBRARY_TIMEOUT_SECONDS = 60.0
"""Without an operator nobody decides about a tier that stays silent: then the restore fails."""


@dataclass(frozen=True, slots=True)
class LibraryOptions:
    """Holds a script's options for running without an agent."""

    folder: str | None = None
    interval_steps: int | None = None
    keep: int | None = None
    job: str | None = None


@dataclass(frozen=True, slots=True)
class ConnectedBackend:
    """A link, and the places that may have checkpoints of this job.

    `older` is the job that the epoch's restore point lies in, if that is not this one.
    """

    backend: SaveBackend
    settings: JobSettings
    sources: tuple[SaveSource, ...]
    patience_seconds: float | None
    source_job_source: SaveSource | None = None
    further: FurtherSources | None = None
    """Asks for the holders that are not among `sources`; None: there are none."""
    agreement: RestoreAgreement | None = None
    """How the ranks go on where the restore point cannot be read; None where the operator decides that."""
    ending: EndSignal | None = None
    """What SIGTERM does; None where an agent gets it."""
    watch: WriterWatch | None = None
    """Finds out that another program claimed a newer generation; None on ranks above 0 and under an agent."""

    def lineage(self) -> Lineage:
        return lineage_of(self.backend.attached)

    def close(self, step: int, offered: bool = False) -> None:
        self.backend.close(step, offered)

    def refuse_overtaken(self) -> None:
        """Raises OtherWriter where another program has begun a newer generation in this job's folder."""
        if self.watch is not None and self.watch.refusal:
            raise OtherWriter(self.watch.refusal)

    def refuse_unsaved(self, step: int) -> None:
        """Raises LastStepNotSaved where a program without an agent has not saved `step`."""
        if isinstance(self.backend, InProcessBackend):
            self.backend.refuse_unsaved(step)


def connect_backend(
    options: LibraryOptions, given: SaveBackend | None, environment: Mapping[str, str] = os.environ
) -> ConnectedBackend:
    """Connects to the agent, or without one starts an in-process backend."""
    if given is not None:
        return connect_agent(given, job_settings(environment), environment.get("SUREFOOT_NODE"))
    if "SUREFOOT_AGENT_SOCKET" in environment:
        from surefoot.ipc.agent_client import AgentBackend

        link = AgentBackend.connect(environment)
        return connect_agent(link, job_settings(environment), environment.get("SUREFOOT_NODE"))
    hint = ""
    if options.folder is None and not environment.get("SUREFOOT_PERSISTENT_URI"):
        # rank 0 logs the place: a first try needs no setting, and two scripts do not restore each other's checkpoints
        options = replace(options, folder=str(default_folder(_OWN_FOLDER)))
        hint = changed_folder_hint() or " (folder= or SUREFOOT_PERSISTENT_URI names another place)"
    return start_in_process(library_settings(options, environment), environment, hint)


def connect_agent(link: SaveBackend, settings: JobSettings, node: str | None) -> ConnectedBackend:
    about, older = link.attached, link.attached.source_job

    def opened(endpoints: Iterable[MemoryServerEndpoint]) -> list[SaveSource]:
        return server_sources(
            endpoints, settings.job, worker_credentials(settings), node, settings.memory_call_timeout_seconds
        )

    def further() -> list[SaveSource] | None:
        every, named = link.fetch_all_servers(), frozenset(about.servers)
        return None if every is None else opened(endpoint for endpoint in every if endpoint not in named)

    sources = opened(about.servers)
    if settings.persistent is not None:
        sources.append(persistent_source(settings.persistent, settings.job))
    begun_from = None if older is None else source_job_source(persistent_settings_at(settings, older.uri), older.uid)
    return ConnectedBackend(
        link, settings, tuple(sources), None, begun_from, further=further if about.is_partial else None
    )


def start_in_process(
    settings: JobSettings, environment: Mapping[str, str] = os.environ, hint: str = ""
) -> ConnectedBackend:
    """Claims an epoch with all ranks and starts this rank's drain.

    Raises ConfigurationError where no folder is named.
    """
    persistent = settings.persistent
    if persistent is None:
        raise ConfigurationError("no folder for checkpoints: give folder= or set SUREFOOT_PERSISTENT_URI")
    world = current_process_group()

    def open_tier() -> ObjectStoreTier:
        return open_persistent(persistent, settings.job)

    def claim() -> str:
        with closing(open_persistent(persistent, settings.job, create_root=True)) as tier:
            return library.claim(tier, world.size, allowed=library.Allowed.of(environment), hint=hint)

    decision = library.StartDecision.from_text(decide_on_rank_zero(world, claim))
    about = library.build_attach_reply(decision, world, settings)
    watch = WriterWatch(about.generation) if world.rank == 0 else None
    keeper = RetentionThread(
        open_tier, decision.lineage, about.generation, persistent.keep, watch, leads=world.rank == 0
    )
    link = InProcessBackend(about, InProcessTargets((PERSISTENT,), lambda _: open_tier(), keeper))

    def again(bad: dict[Checkpoint, str]) -> str:
        with closing(open_tier()) as tier:
            return library.choose_again(tier, decision, bad, library.Allowed.of(environment))

    def moved(anew: library.StartDecision) -> None:
        keeper.set_lineage(anew.lineage, anew.kept_for_rollback)
        link.attached = library.build_attach_reply(anew, world, settings, about.incarnation)

    moved(decision)
    sources = (persistent_source(persistent, settings.job),)
    together = RestoreAgreement(world, decision, again, moved)
    ending = EndSignal(world, about.generation, grace_seconds(), lambda: link.saved_step)
    return ConnectedBackend(
        link, settings, sources, LIBRARY_TIMEOUT_SECONDS, agreement=together, ending=ending, watch=watch
    )


def lineage_of(about: Attached) -> Lineage:
    return tuple(LineageEntry(epoch, parent, size) for epoch, parent, size in about.lineage)


def library_settings(options: LibraryOptions, environment: Mapping[str, str]) -> JobSettings:
    """Overlays the script's options on the environment's settings.

    An interval applies to the folder too: every save is kept there. Where neither names a folder it is `default_folder`.
    """
    if options.folder is None and not environment.get("SUREFOOT_PERSISTENT_URI"):
        options = replace(options, folder=str(default_folder(_OWN_FOLDER)))
    spoken = {**environment, "SUREFOOT_JOB_UID": options.job or environment.get("SUREFOOT_JOB_UID") or "default"}
    if options.folder is not None:
        spoken["SUREFOOT_PERSISTENT_URI"] = _uri(options.folder)
    settings = job_settings(spoken)
    persistent = settings.persistent
    assert persistent is not None, "its URI was just set"
    if options.interval_steps is not None:
        persistent = replace(persistent, interval_steps=options.interval_steps)
    if options.keep is not None:
        persistent = replace(persistent, keep=options.keep)
    return replace(settings, persistent=persistent, interval_steps=persistent.interval_steps)


def _uri(folder: str) -> str:
    return folder if "://" in folder else Path(folder).resolve().as_uri()
