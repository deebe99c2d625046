"""Implements `surefoot doctor`: whether everything is there that a job needs.

Called by `main`. Looks and changes nothing, but for one object in a persistent tier that is named, which it deletes again, and with
--network a short program in workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from surefoot import __version__
from surefoot_operator.api.spec import PersistentTierSpec, TrainingJob
from surefoot_operator.cli.checkpoints import tier_at
from surefoot_operator.cli.cli_errors import EXIT_FAILED, EXIT_OK, UsageError
from surefoot_operator.cli.cluster_access import add_cluster
from surefoot_operator.cli.cluster_checks import cluster_findings, no_cluster
from surefoot_operator.cli.cluster_look import look_at
from surefoot_operator.cli.cluster_refusals import ClusterRefused
from surefoot_operator.cli.doctor_network import Finding, finding_lines, has_fault
from surefoot_operator.cli.job_files import read_job
from surefoot_operator.cli.jobs.job_source import on_cluster
from surefoot_operator.cli.machine_checks import look_here, machine_findings
from surefoot_operator.cli.network_checks import NOT_ASKED, network_findings
from surefoot_operator.cli.network_look import look_at_network
from surefoot_operator.cli.structured_output import add_output, emit
from surefoot_operator.cli.tier_check import probed
from surefoot_operator.optional_dependencies import lacking


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", nargs="?", metavar="WHERE", help="a persistent tier: a folder, file:///… or s3://…")
    parser.add_argument("-f", "--file", type=Path, metavar="JOB.yaml", help="or the TrainingJob that names one")
    parser.add_argument("--endpoint", metavar="URL", help="of an S3 service other than AWS (beside WHERE)")
    parser.add_argument("--region", metavar="NAME", help="the bucket's region (beside WHERE)")
    parser.add_argument(
        "--network", action="store_true", help="try the network from a running worker on each node (pods/exec)"
    )
    parser.add_argument("--no-cluster", action="store_true", help="check this machine and the tier alone")
    add_cluster(parser)
    add_output(parser, ("json", "yaml"))


def run(given: argparse.Namespace) -> int:
    """Runs every check; 1 where one of them found a fault."""
    if given.where is not None and given.file is not None:
        raise UsageError("doctor needs either a folder or URI, or -f JOB.yaml")
    if given.network and given.no_cluster:
        raise UsageError("doctor --network asks workers of a cluster: leave --no-cluster out")
    job = None if given.file is None else read_job(given.file)
    tier = tier_at(given.where, given.endpoint, given.region) if given.where is not None else None
    found = [
        *machine_findings(look_here(), job),
        *_of_cluster(given),
        _of_tier(job, tier),
    ]
    emit(found, given.output, lambda wide: finding_lines(found))
    return EXIT_FAILED if has_fault(found) else EXIT_OK


def _of_cluster(given: argparse.Namespace) -> list[Finding]:
    if given.no_cluster:
        return [no_cluster("no cluster was asked (--no-cluster)")]
    if (missing := lacking("cli")) is not None:
        return [no_cluster(missing)]
    try:
        found = cluster_findings(on_cluster(given, look_at), __version__)
        return [*found, *(network_findings(on_cluster(given, look_at_network)) if given.network else [NOT_ASKED])]
    except UsageError as error:  # none is configured: fine for who runs `surefoot local` alone
        if given.context is not None or given.kubeconfig is not None:
            raise
        why = str(error).partition("; give ")[0]
        return [no_cluster(why, "give --kubeconfig or --context; surefoot local needs no cluster")]
    except ClusterRefused as error:
        return [no_cluster(str(error), state="fault")]


def _of_tier(job: TrainingJob | None, tier: PersistentTierSpec | None) -> Finding:
    tier = tier or (job.spec.checkpoint.persistent if job is not None else None)
    if tier is not None:
        return probed(tier)
    if job is not None:
        said = "the job has no spec.checkpoint.persistent: what every holder loses is lost"
        return Finding("persistent tier", "warning", said, "give it one, or know that no checkpoint outlives the job")
    return Finding("persistent tier", "unknown", "none was named: give WHERE or -f JOB.yaml")
