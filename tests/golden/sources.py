"""Imports everything of the source that golden copies are made from, so that a module that moves is one edit here."""

# ruff: noqa: F401  the other modules of this package import these names from here

from __future__ import annotations

from surefoot import metrics as worker_metrics
from surefoot.format.values import decode_values, encode_values
from surefoot.ipc import trainer_messages
from surefoot.memory_server import scripts
from surefoot.memory_server.scripts import Script
from surefoot.memory_server.sidecar.server_monitor import ServerState as CompanionSeen
from surefoot.memory_server.sidecar.server_monitor import render_metrics as companion_exposition
from surefoot.protocol import wire
from surefoot.protocol.checkpoints.records import Layout, RankManifest
from surefoot.protocol.identities import RankSave
from surefoot.protocol.messages import Notice
from surefoot.settings import PersistentSettings
from surefoot.tiers.persistent import open_persistent
from surefoot_operator import metrics as operator_metrics
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.status import Condition, JobStatus, precondition_of
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.cli import command_base
from surefoot_operator.cli.main import build_parser, main
from surefoot_operator.controller import process_metrics
from surefoot_operator.controller.credentials.derived_secrets import Secrets
from surefoot_operator.controller.worker_environment import WorkerEnvironmentFactory
from surefoot_operator.job_snapshot import PodGroup
from surefoot_operator.platforms.kubernetes import api_writes, pod_groups, pods
from surefoot_operator.platforms.kubernetes.api_objects import JobIdentity
from surefoot_operator.platforms.kubernetes.api_writes import record_job_event as record_event
from surefoot_operator.platforms.kubernetes.pods import build_purge_pod
from surefoot_operator.platforms.local.platform import RunFolderStore
from surefoot_operator.platforms.local.run_folder import (
    DeletionRequest,
    NodeRecord,
    RunFolder,
    WorkerRecord,
    WorkerState,
)
from surefoot_operator.platforms.local.run_folder import parse_record as record_from_json
from surefoot_operator.platforms.local.run_folder import record_to_json as record_to_json
from surefoot_operator.policy.core.actions import CreateWorker, Event
from surefoot_operator.reconcile.job_metrics import FAMILIES
