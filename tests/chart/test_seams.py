"""The chart and the programs it starts mean the same: settings, labels, ports, names."""

from __future__ import annotations

import dataclasses
from pathlib import Path, PurePosixPath

import pytest

from chart import helm
from chart.objects import Object, ports
from chart.test_rendering import EVERYTHING
from surefoot.memory_server.client import MAX_VALUE_BYTES
from surefoot.memory_server.server_process import MALLOC_ENVIRONMENT, ServerSettings, redis_configuration
from surefoot.memory_server.sidecar.sidecar_settings import SidecarSettings, read_sidecar_settings
from surefoot_operator.controller.admission_webhooks import EVICTIONS_PATH, JOBS_PATH
from surefoot_operator.controller.cluster_settings import ClusterSettings, read_cluster_settings
from surefoot_operator.controller.credentials.certificates import server_names
from surefoot_operator.controller.leader.cluster_claim import CLAIMS_LEASE
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.pods import SERVER_SOCKET


def environment(rendered: list[Object], kind: str, name: str, container: str) -> dict[str, str]:
    """The variables of a container; what comes from the pod is filled in."""
    template = helm.one(rendered, kind, name)["spec"]["template"]
    [found] = [one for one in template["spec"]["containers"] if one["name"] == container]
    fields = {"metadata.namespace": helm.NAMESPACE, "metadata.name": "pod-1"}
    return {e["name"]: e.get("value") or fields[e["valueFrom"]["fieldRef"]["fieldPath"]] for e in found["env"]}


def settings(values: Object, release: str = helm.RELEASE) -> ClusterSettings:
    rendered = helm.objects(values, release)
    name = "surefoot-operator" if release == helm.RELEASE else f"{release}-surefoot-operator"
    return read_cluster_settings(environment(rendered, "Deployment", name, "operator"), [], helm.NAMESPACE)


def test_the_default_release_says_what_the_operator_would_assume() -> None:
    assumed = read_cluster_settings({"SUREFOOT_POD_NAME": "pod-1"}, [], helm.NAMESPACE)
    assert settings({}) == assumed


@pytest.mark.parametrize("values", [{}, {"operator": {"watchNamespace": "training", "shards": 3}}])
def test_the_role_allows_what_the_claim_on_the_cluster_calls(values: Object) -> None:
    """Whatever the release looks after: an installation that may not claim would stand by for good."""
    for release in (helm.RELEASE, "other"):
        rendered = helm.objects(values, release)
        roles = [
            one
            for one in rendered
            if one["kind"] == "Role" and one["metadata"].get("namespace") == CLAIMS_LEASE.namespace
        ]
        allowed = {
            (verb, name)
            for role in roles
            for rule in role["rules"]
            if rule["resources"] == ["leases"]
            for verb in rule["verbs"]
            for name in rule.get("resourceNames", [""])
        }
        assert allowed >= {("create", ""), ("get", CLAIMS_LEASE.name), ("update", CLAIMS_LEASE.name)}
        assert not {("update", ""), ("get", ""), ("delete", "")} & allowed, "kubelets' leases are not the operator's"
        bound = [one["roleRef"]["name"] for one in rendered if one["kind"] == "RoleBinding"]
        assert all(role["metadata"]["name"] in bound for role in roles)


def test_another_releases_names_reach_its_operator() -> None:
    found = settings({}, "other")
    assert found.lease_name == "other-surefoot-operator"
    assert found.coordinator_url == f"wss://other-surefoot-coordinator.{helm.NAMESPACE}.svc:8443/v1/agents"
    assert found.tls_secret == "other-surefoot-coordinator-tls"
    assert found.keys_secret == "other-surefoot-keys"
    assert found.memory_admin_secret == "other-surefoot-memory-admin"
    assert found.memory_tls_secret == "other-surefoot-memory-tls"
    assert found.memory_daemonset == "other-surefoot-memory"


def test_every_value_reaches_the_operator() -> None:
    operator = {**EVERYTHING["operator"], "logLevel": "DEBUG", "agentCommand": "a b"}
    found = settings({**EVERYTHING, "logFormat": "json", "operator": operator})
    assert found.watch_namespace == "training"
    assert found.shards == 3
    assert found.runtime_image == "training:1"
    assert (found.tls_secret, found.keys_secret, found.memory_admin_secret) == ("tls", "keys", "admin")
    assert (found.node_reports, found.node_taint) == (True, "NoSchedule")
    assert not settings({"operator": {"nodeReports": {"enabled": False}}}).node_reports
    assert found.admission_webhooks == f"surefoot.{helm.NAMESPACE}"
    assert found.gang_schedulers == ("Coscheduling",)
    assert settings({}).gang_schedulers == ()
    assert (found.log_level, found.log_format) == ("DEBUG", "json")
    assert found.agent_command == ("a", "b")


def test_no_variable_is_for_nobody() -> None:
    tier = {**EVERYTHING["memoryTier"], "localSocket": {"enabled": True}}
    rendered = helm.objects({**EVERYTHING, "memoryTier": tier})
    known = {f"SUREFOOT_{field.name.upper()}" for field in dataclasses.fields(ClusterSettings)}
    given = environment(rendered, "Deployment", "surefoot-operator", "operator").keys() - {"A"}
    assert given <= known
    assert known - given == {"SUREFOOT_KUBECONFIG", "SUREFOOT_IDENTITY"}  # of a desk, and made of the others


def test_the_companion_logs_in_the_format_of_the_operator() -> None:
    rendered = helm.objects({"logFormat": "json"})
    assert environment(rendered, "DaemonSet", "surefoot-memory", "companion")["SUREFOOT_LOG_FORMAT"] == "json"


def test_the_companion_finds_the_redis_beside_it() -> None:
    rendered = helm.objects({})
    found = read_sidecar_settings(environment(rendered, "DaemonSet", "surefoot-memory", "companion"))
    template = helm.one(rendered, "DaemonSet", "surefoot-memory")["spec"]["template"]
    assert ports(template) == {"redis": found.redis_port, "metrics": found.port}
    assert found == dataclasses.replace(SidecarSettings(), password_file="/var/run/secrets/surefoot-memory/password")


def test_tls_is_told_to_everybody_who_speaks_to_redis() -> None:
    rendered = helm.objects({"memoryTier": {"tls": {"enabled": True}}})
    assert read_cluster_settings(environment(rendered, "Deployment", "surefoot-operator", "operator"), []).memory_tls
    assert read_sidecar_settings(environment(rendered, "DaemonSet", "surefoot-memory", "companion")).tls_folder
    template = helm.one(rendered, "DaemonSet", "surefoot-memory")["spec"]["template"]
    assert api_objects.MEMORY_SERVER_TLS in template["metadata"]["annotations"]
    lines = helm.one(rendered, "ConfigMap", "surefoot-memory")["data"]["redis.conf"].splitlines()
    assert {"port 0", f"tls-port {api_objects.MEMORY_SERVER_PORT}"} <= set(lines), "nobody is let in without it"


def test_a_socket_is_where_workers_look_for_it() -> None:
    rendered = helm.objects({"memoryTier": {"localSocket": {"enabled": True, "hostPath": "/run/of-nodes"}}})
    told = read_cluster_settings(environment(rendered, "Deployment", "surefoot-operator", "operator"), [])
    lines = helm.one(rendered, "ConfigMap", "surefoot-memory")["data"]["redis.conf"].splitlines()
    assert {"port 6379", f"unixsocket {SERVER_SOCKET.format(server=0)}", "unixsocketperm 777"} <= set(lines)
    spec = helm.one(rendered, "DaemonSet", "surefoot-memory")["spec"]["template"]["spec"]
    [volume] = [one for one in spec["volumes"] if "hostPath" in one]
    assert volume["hostPath"] == {"path": told.memory_socket_folder, "type": "DirectoryOrCreate"}
    [first] = spec["initContainers"]
    mount = {"name": volume["name"], "mountPath": str(PurePosixPath(SERVER_SOCKET).parent)}
    assert first["command"] == ["chown", str(spec["securityContext"]["runAsUser"]), mount["mountPath"]]
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    redis = next(one for one in spec["containers"] if one["name"] == "redis")
    assert mount in first["volumeMounts"]
    assert mount in redis["volumeMounts"]


def test_no_socket_is_made_unasked() -> None:
    assert not any("unixsocket" in text or "hostPath" in text for text in map(str, helm.objects(EVERYTHING)))


@pytest.mark.parametrize(
    ("kind", "name", "selector"),
    [
        ("DaemonSet", "surefoot-memory", api_objects.MEMORY_SERVER_SELECTOR),
        ("Deployment", "surefoot-operator", f"{api_objects.PART_LABEL}=operator"),
    ],
)
def test_pods_bear_the_labels_that_the_operator_looks_for(kind: str, name: str, selector: str) -> None:
    key, _, value = selector.partition("=")
    assert helm.one(helm.objects({}), kind, name)["spec"]["template"]["metadata"]["labels"][key] == value


def test_workers_are_let_in_by_the_label_that_they_bear() -> None:
    policy = helm.one(helm.objects({}), "NetworkPolicy", "surefoot-operator")["spec"]
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == {api_objects.PART_LABEL: api_objects.WORKER}


def test_the_tiers_servers_have_the_allocators_options_of_a_local_one() -> None:
    found = environment(helm.objects({}), "DaemonSet", "surefoot-memory", "redis")
    wanted = {name: value for name, value in MALLOC_ENVIRONMENT.items() if name.endswith("MALLOC_CONF")}
    assert {name: found.get(name) for name in wanted} == wanted


def test_the_webhooks_call_paths_that_are_served_under_a_name_of_the_certificate() -> None:
    rendered = helm.objects(EVERYTHING)
    [configuration] = [one for one in rendered if one["kind"] == "ValidatingWebhookConfiguration"]
    assert configuration["metadata"]["name"] == settings(EVERYTHING).admission_webhooks
    told = [hook["clientConfig"]["service"] for hook in configuration["webhooks"]]
    assert [one["path"] for one in told] == [JOBS_PATH, *[EVICTIONS_PATH] * settings(EVERYTHING).shards]
    names = server_names(settings(EVERYTHING).coordinator_url, helm.NAMESPACE, settings(EVERYTHING).shards)
    assert {f"{one['name']}.{one['namespace']}.svc" for one in told} <= set(names)


def test_a_server_on_a_cluster_has_the_configuration_of_one_on_a_machine() -> None:
    """But for what each place decides: addresses, the folder, and where the password comes from."""
    own = {"bind", "protected-mode", "dir", "requirepass"}
    text = helm.one(helm.objects(), "ConfigMap", "surefoot-memory")["data"]["redis.conf"]
    on_cluster = _directives(text)
    on_machine = _directives(redis_configuration(ServerSettings(6379, 4 << 30, Path("/data"), password="a password")))
    assert {n: v for n, v in on_cluster.items() if n not in own} == {
        n: v for n, v in on_machine.items() if n not in own
    }
    assert on_machine["maxmemory-clients"] == str(256 << 20)
    assert on_machine["proto-max-bulk-len"] == f"{MAX_VALUE_BYTES >> 20}mb"
    assert {"client-output-buffer-limit", "client-query-buffer-limit", "maxclients"} < on_machine.keys()


def _directives(text: str) -> dict[str, str]:
    """Name → value of each line; none is there twice."""
    lines = [line.partition(" ") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert len({name for name, _, _ in lines}) == len(lines)
    return {name: value for name, _, value in lines}
