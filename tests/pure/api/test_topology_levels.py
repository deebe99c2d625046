"""Where a node stands, by the labels that clouds, vendors and people give it."""

from __future__ import annotations

import pytest

from surefoot_operator.api.topology_levels import HOSTNAME, LEVELS, spread_levels, topology_path

ZONE, RACK = "topology.kubernetes.io/zone", "topology.kubernetes.io/rack"


@pytest.mark.parametrize(
    ("labels", "path"),
    [
        ({HOSTNAME: "n1", "team": "a"}, ()),
        ({ZONE: "z1"}, ("", "z1")),
        ({ZONE: ""}, ()),
        ({ZONE: "z1", RACK: "r3"}, ("", "z1", "", "", "", "r3")),
        ({"cloud.google.com/gce-topology-block": "b", "cloud.google.com/gce-topology-subblock": "s"}, ("", "", "", "b", "", "s")),
        ({"nvidia.com/gpu.clique": "c.1", RACK: "r3"}, ("", "", "", "", "", "r3", "c.1")),
        ({RACK: "r3", "topology.k8s.aws/network-node-layer-3": "nn-1"}, ("", "", "", "", "", "r3")),
    ],
)  # fmt: skip
def test_a_path_names_a_place_at_each_level_down_to_the_last_label(
    labels: dict[str, str], path: tuple[str, ...]
) -> None:
    assert topology_path(labels) == path
    assert len(path) <= len(LEVELS)


def test_a_jobs_own_label_is_its_highest_level() -> None:
    labels = {ZONE: "z1", RACK: "r3", "example.com/row": "row-7"}
    assert topology_path(labels, RACK) == ("r3",), "what is above it binds no copy"
    assert topology_path(labels, "example.com/row")[:3] == ("row-7", "", "z1")
    assert [level.noun for level in spread_levels("example.com/row")][:2] == ["row", "region"]
    assert spread_levels(RACK)[0].noun == "rack"
    assert spread_levels(HOSTNAME) == LEVELS


def test_no_label_stands_at_two_levels() -> None:
    every = [label for level in LEVELS for label in level.labels]
    assert len(every) == len(set(every))
