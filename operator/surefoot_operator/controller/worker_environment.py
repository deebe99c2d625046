"""Builds the environment of a new worker from the job's spec.

Called by the reconciler through the composition root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from surefoot.logs import VARIABLE
from surefoot.settings import JobSettings, PersistentSettings, job_environment
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.controller.credentials.derived_secrets import Secrets
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.policy.core.actions import CreateWorker

WORKER_METRICS_PORT = 9464
"""Metrics port of each worker on a cluster, where every pod has its own address."""

_SECRET_VARIABLES = ("SUREFOOT_MEMORY_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""Variables that are passed as secrets."""


@dataclass(frozen=True, slots=True)
class WorkerEnvironmentFactory:
    """Builds the environment of each worker of a job."""

    coordinator_url: str
    """Address that agents connect to."""
    memory_call_timeout_seconds: float
    """Time limit of one call to a memory server."""
    secrets: Secrets = field(repr=False)
    """Derives the passwords and tokens of jobs and workers."""
    has_derived_token: bool = True
    """Whether each worker gets a derived token; on a cluster agents use the token of their service account."""
    coordinator_ca: Callable[[], str] = str
    """Returns the CA certificate of the coordinator in PEM; empty: agents use the trust store of their machine."""
    memory_tls_ca: Callable[[], str] = str
    """Returns the CA certificate of the memory servers in PEM; empty: they have no TLS."""
    fallback_url: str = ""
    """Second address for agents that reach no operator at the first; the operator there refers them to the leader."""
    metrics_port: int | None = None
    """Port on which each worker serves its metrics; 0: any free one of its machine; None: no metrics."""
    log_format: str = "text"
    """Log format of agents; a job's own template may set another."""

    def __call__(self, job: TrainingJob, worker: CreateWorker) -> WorkerEnvironment:
        """Builds the environment of one worker; passwords and tokens are kept apart as secrets."""
        variables = job_environment(self._job_settings(job))
        secret = {name: variables.pop(name) for name in _SECRET_VARIABLES if name in variables}
        if self.has_derived_token:
            secret["SUREFOOT_TOKEN"] = self.secrets.worker_token(job.uid, worker.index, worker.attempt)
        health = job.spec.health_policy
        plain = {
            **variables,
            "SUREFOOT_JOB_NAME": job.name,
            "SUREFOOT_JOB_NAMESPACE": job.namespace,
            "SUREFOOT_WORKER_INDEX": str(worker.index),
            "SUREFOOT_WORKER_ATTEMPT": str(worker.attempt),
            "SUREFOOT_COORDINATOR_URL": self.coordinator_url,
            "SUREFOOT_LOCAL_RANKS": str(job.spec.nproc_per_node),
            "SUREFOOT_HEARTBEAT_SECONDS": str(health.heartbeat_seconds),
            "SUREFOOT_STEP_TIMEOUT_SECONDS": str(health.step_timeout_seconds),
        }
        if self.fallback_url not in ("", self.coordinator_url):
            plain["SUREFOOT_COORDINATOR_FALLBACK_URL"] = self.fallback_url
        if health.pre_join_check != "Disabled":
            plain["SUREFOOT_PRE_JOIN_CHECK"] = health.pre_join_check
        if job.spec.warm_imports != "auto":
            plain["SUREFOOT_WARM_IMPORTS"] = job.spec.warm_imports
        if authority := self.coordinator_ca():
            plain["SUREFOOT_COORDINATOR_CA"] = authority
        if self.metrics_port is not None:
            plain["SUREFOOT_METRICS_PORT"] = str(self.metrics_port)
        if self.log_format != "text":
            plain[VARIABLE] = self.log_format
        return WorkerEnvironment(plain, secret)

    def _job_settings(self, job: TrainingJob) -> JobSettings:
        checkpoint, persistent = job.spec.checkpoint, job.spec.checkpoint.persistent
        account = self.secrets.memory_account(job.uid)
        numerics = job.spec.health_policy.numerics
        return JobSettings(
            job=job.uid,
            interval_steps=checkpoint.memory.base_steps,
            replicas=checkpoint.memory.replicas,
            keep=checkpoint.memory.keep,
            memory_user=account.user,
            memory_password=account.password,
            memory_call_timeout_seconds=self.memory_call_timeout_seconds,
            memory_tls_ca=self.memory_tls_ca(),
            memory_bytes_per_second=float(checkpoint.memory.bandwidth_bytes or 0),
            good_after_steps=numerics.good_after_steps if numerics is not None else 0,
            persistent=PersistentSettings(
                uri=persistent.uri,
                interval_steps=persistent.fixed_steps or 0,
                keep=persistent.keep,
                endpoint=persistent.endpoint,
                region=persistent.region,
                ca_bundle=persistent.ca_bundle,
                sse=persistent.sse,
                bytes_per_second=float(persistent.bandwidth_bytes or 0),
            )
            if persistent is not None
            else None,
        )
