"""A real cluster for a module of tests: the one that stands, else one of its own that is taken down at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from cluster import engines, layout, use
from cluster.api import Api
from cluster.engine import Engine

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def a_cluster(nodes: int) -> Iterator[Engine]:
    """The body of a fixture; skips the test where no cluster can be had. Waits while another test run has it for itself."""
    if use.stands():
        with use.held(alone=False):
            if use.stands():  # whoever had it may have taken it down
                chosen = engines.choose()
                if not chosen.status().is_well:
                    pytest.skip("the cluster on this machine is hurt; `python -m cluster up` repairs it")
                yield chosen
                return
    if use.why_none():
        pytest.skip(use.why_none())
    with use.held(alone=True), use.standing(nodes) as engine:
        yield engine


def install_crd(api: Api) -> None:
    """The TrainingJob of this checkout, also where a cluster that stands has another one's."""
    body = yaml.safe_load((layout.PROJECT / "manifests" / "crd.yaml").read_text(encoding="utf-8"))
    api.create(CRDS, body)
    api.merge(f"{CRDS}/{body['metadata']['name']}", {"spec": body["spec"]})
