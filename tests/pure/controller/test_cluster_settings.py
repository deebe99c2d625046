"""The operator's own settings: where each comes from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot_operator.controller.cluster_settings import InvalidSetting, read_cluster_settings


def test_in_a_pod_the_environment_says_enough() -> None:
    found = read_cluster_settings(
        {"SUREFOOT_NAMESPACE": "sf", "SUREFOOT_POD_NAME": "operator-x"}, [], identity_suffix="abc"
    )
    assert found.namespace == "sf"
    assert found.identity == found.pod_name == "operator-x"
    assert found.coordinator_url == "wss://surefoot-coordinator.sf.svc:8443/v1/agents"
    assert found.kubeconfig is None
    assert (found.coordinator_port, found.metrics_port) == (8443, 8080)
    assert found.agent_command == ("surefoot-agent", "--")
    assert not found.memory_tls


def test_its_own_files_name_the_namespace_and_its_host_the_pod() -> None:
    found = read_cluster_settings({"HOSTNAME": "operator-y"}, [], "from-a-file")
    assert (found.namespace, found.pod_name) == ("from-a-file", "operator-y")
    assert read_cluster_settings({}, []).namespace == "surefoot-system"


def test_flags_win_over_variables() -> None:
    environment = {"SUREFOOT_NAMESPACE": "a", "SUREFOOT_COORDINATOR_PORT": "1", "SUREFOOT_LOG_LEVEL": "debug"}
    found = read_cluster_settings(environment, ["--namespace", "b", "--coordinator-port", "2"])
    assert (found.namespace, found.coordinator_port, found.log_level) == ("b", 2, "DEBUG")


def test_on_a_desk_two_of_one_name_are_two() -> None:
    flags = ["--kubeconfig", "some/file", "--pod-name", "me"]
    first, second = (read_cluster_settings({}, flags, identity_suffix=life) for life in ("1", "2"))
    assert first.kubeconfig == Path("some/file")
    assert first.pod_name == second.pod_name == "me"
    assert first.identity != second.identity


def test_every_other_variable_is_read() -> None:
    environment = {
        "SUREFOOT_WATCH_NAMESPACE": "team",
        "SUREFOOT_LEASE_NAME": "lease",
        "SUREFOOT_TLS_SECRET": "tls",
        "SUREFOOT_KEYS_SECRET": "keys",
        "SUREFOOT_MEMORY_ADMIN_SECRET": "admin",
        "SUREFOOT_MEMORY_DAEMONSET": "memory",
        "SUREFOOT_MEMORY_TLS": "1",
        "SUREFOOT_MEMORY_SOCKET_FOLDER": "/run/surefoot",
        "SUREFOOT_AGENT_COMMAND": "python -m surefoot.agent 'a b' --",
        "SUREFOOT_RUNTIME_IMAGE": "registry/image:1",
        "SUREFOOT_METRICS_PORT": "0",
        "SUREFOOT_SHARDS": "3",
    }
    found = read_cluster_settings(environment, [])
    assert (found.watch_namespace, found.shards) == ("team", 3)
    assert (found.lease_name, found.tls_secret, found.keys_secret) == ("lease", "tls", "keys")
    assert (found.memory_admin_secret, found.memory_daemonset, found.memory_tls) == ("admin", "memory", True)
    assert found.memory_socket_folder == "/run/surefoot"
    assert found.agent_command == ("python", "-m", "surefoot.agent", "a b", "--")
    assert (found.runtime_image, found.metrics_port) == ("registry/image:1", 0)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("SUREFOOT_COORDINATOR_URL", "https://x/v1/agents", "it must have the form wss://HOST:PORT/v1/agents"),
        ("SUREFOOT_COORDINATOR_URL", "wss:///v1/agents", "it must have the form"),
        ("SUREFOOT_COORDINATOR_PORT", "70000", "it must be a port from 0 to 65535"),
        ("SUREFOOT_METRICS_PORT", "http", "it must be a port from 0 to 65535"),
        ("SUREFOOT_PROBE_PORT", "65536", "it must be a port from 0 to 65535"),
        ("SUREFOOT_SHARDS", "0", "it must be a number from 1 to 8"),
        ("SUREFOOT_SHARDS", "nine", "it must be a number from 1 to 8"),
        ("SUREFOOT_MEMORY_TLS", "yes", "it must be 0 or 1"),
        ("SUREFOOT_MEMORY_SOCKET_FOLDER", "run/surefoot", "it must be an absolute path"),
        ("SUREFOOT_AGENT_COMMAND", "a 'b", "it must be a command line"),
        ("SUREFOOT_AGENT_COMMAND", " ", "it must be a command line"),
        ("SUREFOOT_LOG_LEVEL", "LOUD", "it must be one of DEBUG, INFO, WARNING, ERROR"),
        ("SUREFOOT_LOG_FORMAT", "xml", "it must be one of text, json"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(name: str, text: str, sentence: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name} is .*{sentence}"):
        read_cluster_settings({name: text}, [])


def test_gang_schedulers_are_named_with_commas_between() -> None:
    assert read_cluster_settings({}, []).gang_schedulers == ()
    found = read_cluster_settings({"SUREFOOT_GANG_SCHEDULERS": "Coscheduling, "}, [])
    assert found.gang_schedulers == ("Coscheduling",)
    with pytest.raises(InvalidSetting, match="list of some of Coscheduling"):
        read_cluster_settings({"SUREFOOT_GANG_SCHEDULERS": "coscheduling"}, [])
