"""What the chart renders hangs together: selectors choose labels, ports have names, roles name what they allow, pods are restricted."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import yaml

from chart import helm
from chart.objects import Object, containers, ports, rules, selects, templates
from support.expressions import panels_of
from surefoot.memory_server.sidecar.sidecar_settings import MAX_SERVERS

EVERYTHING: Object = {
    "commonLabels": {"team": "training"},
    "imagePullSecrets": ["registry"],
    "imageRegistry": "mirror.example:5000/hub/",
    "operator": {
        "replicas": 3,
        "shards": 3,
        "args": ["--log-level", "DEBUG"],
        "nodeReports": {"enabled": True, "taint": "NoSchedule"},
        "admission": {"jobs": {"enabled": True}, "evictions": {"enabled": True}, "timeoutSeconds": 2},
        "gangSchedulers": ["Coscheduling"],
        "runtimeImage": "training:1",
        "watchNamespace": "training",
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "priorityClassName": "high",
        "podLabels": {"one": "1"},
        "podAnnotations": {"two": "2"},
        "image": {"digest": "sha256:" + "a" * 64},
        "serviceAccount": {"name": "somebody", "annotations": {"role": "x"}},
    },
    "coordinator": {"tlsSecret": "tls", "keysSecret": "keys", "annotations": {"three": "3"}},
    "memoryTier": {
        "servers": 3,
        "maxMemory": "8Gi",
        "adminSecret": "admin",
        "tls": {"enabled": True},
        "nodeSelector": {"pool": "gpu"},
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-node-critical",
        "podLabels": {"four": "4"},
        "podAnnotations": {"five": "5"},
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "companion": {"image": {"repository": "companion", "tag": "1"}},
    },
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "15s"},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "15s"},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True, "annotations": {"folder": "Training"}},
    },
}
LITTLE: Object = {
    "crds": {"enabled": False},
    "rbac": {"create": False},
    "operator": {"replicas": 1, "serviceAccount": {"create": False}},
    "memoryTier": {"enabled": False},
    "networkPolicy": {"enabled": False},
}
CASES = {"default": {}, "everything": EVERYTHING, "little": LITTLE}
NODE_SCOPED = (
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "PriorityClass",
    "Namespace",
    "ValidatingWebhookConfiguration",
)
RESTRICTED_CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.fixture(scope="module", params=CASES)
def rendered(request: pytest.FixtureRequest) -> list[Object]:
    return helm.objects(CASES[request.param])


def test_helm_lint_finds_nothing() -> None:
    assert "0 chart(s) failed" in helm.helm("lint", "--strict", "--kube-version", helm.KUBERNETES, str(helm.CHART))


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_a_rendering_is_deterministic(values: Object) -> None:
    assert helm.text(values) == helm.text(values)


def test_every_object_is_whole(rendered: list[Object]) -> None:
    keys = []
    for found in rendered:
        assert found.keys() >= {"apiVersion", "kind", "metadata"}, found
        metadata = found["metadata"]
        if found["kind"] == "CustomResourceDefinition":
            continue
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "Helm", metadata
        assert ("namespace" in metadata) == (found["kind"] not in NODE_SCOPED), metadata
        keys.append((found["kind"], metadata.get("namespace"), metadata["name"]))
    assert len(keys) == len(set(keys))


def test_selectors_choose_the_pods_they_are_for(rendered: list[Object]) -> None:
    labels = {name: template["metadata"]["labels"] for name, template in templates(rendered)}
    for found in rendered:
        name, spec = f"{found['kind']}/{found['metadata']['name']}", found.get("spec", {})
        if found["kind"] in ("Deployment", "DaemonSet"):
            assert [n for n, have in labels.items() if selects(spec["selector"]["matchLabels"], have)] == [name]
        elif found["kind"] in ("PodDisruptionBudget", "NetworkPolicy"):
            wanted = (spec.get("selector") or spec["podSelector"])["matchLabels"]
            assert len([n for n, have in labels.items() if selects(wanted, have)]) == 1, name
        elif found["kind"] == "Service":
            wanted = {
                k: v
                for k, v in spec["selector"].items()
                if not k.startswith(("surefoot.dev/leader", "surefoot.dev/leads-"))
            }
            assert len([n for n, have in labels.items() if selects(wanted, have)]) == 1, name


def test_named_ports_are_there(rendered: list[Object]) -> None:
    pods = dict(templates(rendered))
    for found in rendered:
        if found["kind"] == "Service":
            wanted = {
                k: v
                for k, v in found["spec"]["selector"].items()
                if not k.startswith(("surefoot.dev/leader", "surefoot.dev/leads-"))
            }
            [template] = [t for t in pods.values() if selects(wanted, t["metadata"]["labels"])]
            for port in found["spec"]["ports"]:
                assert ports(template)[port["targetPort"]] == port["port"]
        elif found["kind"] == "NetworkPolicy":
            wanted = found["spec"]["podSelector"]["matchLabels"]
            [template] = [t for t in pods.values() if selects(wanted, t["metadata"]["labels"])]
            used = {port["port"] for rule in found["spec"]["ingress"] for port in rule["ports"]}
            fewer = {f"redis-{server}" for server in range(1, MAX_SERVERS)} if "redis" in used else set()
            assert used - fewer == ports(template).keys() - fewer, "every port has its rule, and none is for nothing"
            assert ports(template).keys() <= used
    for template in pods.values():
        for container in containers(template):
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                asked = container.get(probe, {})
                port = (asked.get("httpGet") or asked.get("tcpSocket") or {}).get("port")
                assert port is None or port in [p["name"] for p in container["ports"]]


def test_mounts_have_their_volumes(rendered: list[Object]) -> None:
    for name, template in templates(rendered):
        volumes = [volume["name"] for volume in template["spec"].get("volumes", [])]
        assert len(volumes) == len(set(volumes)), name
        for container in containers(template):
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= set(volumes), name


def test_every_container_is_restricted_and_has_its_limits(rendered: list[Object]) -> None:
    for name, template in templates(rendered):
        pod = template["spec"]["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert pod["runAsUser"] > 0, name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not any(template["spec"].get(key) for key in ("hostNetwork", "hostPID", "hostIPC")), name
        assert all("hostPath" not in volume for volume in template["spec"].get("volumes", [])), name
        for container in containers(template):
            security = container["securityContext"]
            assert RESTRICTED_CONTAINER.items() <= security.items(), name
            assert security["readOnlyRootFilesystem"] is True, name
            assert container["resources"]["limits"]["memory"], name
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}, name


def test_roles_name_what_they_allow(rendered: list[Object]) -> None:
    for name, rule in rules(rendered):
        said = [*rule.get("apiGroups", []), *rule.get("resources", []), *rule["verbs"], *rule.get("resourceNames", [])]
        assert not any("*" in word for word in said), f"{name}: {rule}"
        assert "nonResourceURLs" not in rule, f"{name}: {rule}"
        dangerous = {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"])
        assert not dangerous, f"{name}: {rule}"


def test_secrets_are_never_listed_and_pods_never_entered(rendered: list[Object]) -> None:
    for name, rule in rules(rendered):
        if "secrets" in rule["resources"]:
            assert not {"list", "watch"} & set(rule["verbs"]), f"{name}: {rule}"
        assert not {"pods/exec", "pods/attach", "pods/portforward", "serviceaccounts/token"} & set(rule["resources"])


def test_alerts_link_to_their_sections_where_the_page_is_known() -> None:
    page = "https://docs.example/surefoot/operations"
    values = {"metrics": {"prometheusRule": {"enabled": True, "runbookUrl": page}}}
    alerts = yaml.safe_load((helm.CHART / "files" / "alerts.yaml").read_text())
    plain = {"metrics": {"prometheusRule": {"enabled": True}}}
    assert helm.one(helm.objects(plain), "PrometheusRule", "surefoot")["spec"] == alerts
    linked = helm.one(helm.objects(values), "PrometheusRule", "surefoot")["spec"]
    found = [rule for group in linked["groups"] for rule in group["rules"]]
    assert [rule["annotations"].pop("runbook_url") for rule in found] == [f"{page}#{r['alert'].lower()}" for r in found]
    assert linked == alerts


def test_alerts_link_to_their_panels_where_grafana_is_known() -> None:
    values = {"metrics": {"prometheusRule": {"enabled": True, "grafanaUrl": "https://grafana.example"}}}
    board = json.loads((helm.CHART / "files" / "dashboards" / "surefoot-checkpoints.json").read_text())
    ids = {panel["title"]: panel["id"] for panel in panels_of(board)}
    found = helm.one(helm.objects(values), "PrometheusRule", "surefoot")["spec"]
    for rule in (rule for group in found["groups"] for rule in group["rules"]):
        said = rule["annotations"]
        assert said["panel_url"] == f"https://grafana.example/d/{board['uid']}?viewPanel={ids[said['panel']]}"
        assert "runbook_url" not in said


@pytest.mark.parametrize("name", ["runbookUrl", "grafanaUrl"])
def test_an_address_that_is_no_url_is_refused(name: str) -> None:
    with pytest.raises(helm.HelmRefused, match=name):
        helm.objects({"metrics": {"prometheusRule": {"enabled": True, name: "docs/monitoring.md"}}})


def test_kubernetes_own_roles_get_what_people_do_to_jobs_and_nothing_else() -> None:
    found = [one for one in helm.objects() if "aggregate-to-admin" in str(one["metadata"].get("labels"))]
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    given: dict[str, set[tuple[str, str]]] = {"view": set(), "edit": set(), "admin": set()}
    for role in found:
        allowed = {(verb, what) for rule in role["rules"] for verb in rule["verbs"] for what in rule["resources"]}
        assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {"surefoot.dev"}
        for label in role["metadata"]["labels"]:
            if label.startswith(prefix):
                given[label.removeprefix(prefix)] |= allowed
    looks = {(verb, f"trainingjobs{part}") for verb in ("get", "list", "watch") for part in ("", "/status", "/scale")}
    acts = {(verb, "trainingjobs") for verb in ("create", "update", "patch", "delete")}
    scales = {(verb, "trainingjobs/scale") for verb in ("update", "patch")}
    assert given == {"view": looks, "edit": looks | acts | scales, "admin": looks | acts | scales}
    assert not [one for one in helm.objects({"rbac": {"aggregate": False}}) if one in found]


def test_two_releases_share_nothing_but_the_crd() -> None:
    def keys(release: str, namespace: str) -> set[tuple[str, Any, str]]:
        found = helm.objects({}, release, namespace)
        return {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in found}

    installs = [keys("surefoot", "one"), keys("surefoot", "two"), keys("other", "one")]
    for left, right in itertools.combinations(installs, 2):
        assert {kind for kind, _, _ in left & right} == {"CustomResourceDefinition"}


def test_the_crd_is_guarded_and_kept() -> None:
    name = "trainingjobs.surefoot.dev"
    found = helm.one(helm.objects(), "CustomResourceDefinition", name)
    assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert found["spec"]["names"]["shortNames"] == ["tj"]
    assert not [one for one in helm.objects(LITTLE) if one["kind"] == "CustomResourceDefinition"]


def test_only_agents_and_operator_reach_redis() -> None:
    policy = helm.one(helm.objects(), "NetworkPolicy", "surefoot-memory")["spec"]
    [rule] = [rule for rule in policy["ingress"] if {"port": "redis", "protocol": "TCP"} in rule["ports"]]
    parts = [peer["podSelector"]["matchLabels"]["surefoot.dev/part"] for peer in rule["from"]]
    assert parts == ["worker", "operator"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert not policy["egress"]


def test_a_tier_over_tls_speaks_nothing_else_and_never_sees_its_authority_s_key() -> None:
    rendered = helm.objects({"memoryTier": {"tls": {"enabled": True}}})
    conf = helm.one(rendered, "ConfigMap", "surefoot-memory")["data"]["redis.conf"].splitlines()
    assert {"port 0", "tls-port 6379", "tls-auth-clients no"} <= set(conf)
    template = helm.one(rendered, "DaemonSet", "surefoot-memory")["spec"]["template"]
    assert template["metadata"]["annotations"]["surefoot.dev/tls"] == "true"
    [volume] = [one for one in template["spec"]["volumes"] if one["name"] == "tls"]
    assert [item["key"] for item in volume["secret"]["items"]] == ["ca.crt", "tls.crt", "tls.key"]
    companion = next(c for c in template["spec"]["containers"] if c["name"] == "companion")
    folder = next(e["value"] for e in companion["env"] if e["name"] == "SUREFOOT_MEMORY_TLS_FOLDER")
    for container in template["spec"]["containers"]:
        assert {"name": "tls", "mountPath": folder, "readOnly": True} in container["volumeMounts"]


def test_a_new_chart_version_alone_is_no_new_revision_of_the_memory_tier() -> None:
    labels = helm.one(helm.objects(), "DaemonSet", "surefoot-memory")["spec"]["template"]["metadata"]["labels"]
    assert labels == {
        "app.kubernetes.io/name": "surefoot",
        "app.kubernetes.io/instance": "surefoot",
        "surefoot.dev/part": "memory-tier",
    }


def test_the_memory_tier_is_replaced_by_the_operator_alone() -> None:
    assert helm.one(helm.objects(), "DaemonSet", "surefoot-memory")["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_the_password_of_the_memory_tier_is_in_no_object_and_no_environment() -> None:
    assert [one for one in helm.objects() if one["kind"] == "Secret"] == []
    for _, template in templates(helm.objects()):
        for container in containers(template):
            assert all("secretKeyRef" not in entry.get("valueFrom", {}) for entry in container.get("env", []))


def test_alerts_and_dashboards_are_the_files_as_they_are() -> None:
    rendered, files = helm.objects(EVERYTHING), helm.CHART / "files"
    rules = helm.one(rendered, "PrometheusRule", "surefoot")["spec"]
    assert rules == yaml.safe_load((files / "alerts.yaml").read_text(encoding="utf-8"))
    shown = helm.one(rendered, "ConfigMap", "surefoot-dashboards")["data"]
    there = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in files.glob("dashboards/*.json")}
    assert there
    assert {name: json.loads(text) for name, text in shown.items()} == there
    assert sum(map(len, shown.values())) < 900_000, "a ConfigMap holds 1 MiB"


def test_panels_link_to_runbooks_where_people_read_them() -> None:
    page = "https://docs.example/surefoot/operations"
    shown = helm.objects({"metrics": {"dashboards": {"enabled": True}, "prometheusRule": {"runbookUrl": page}}})
    for text in helm.one(shown, "ConfigMap", "surefoot-dashboards")["data"].values():
        variables = {v["name"]: v.get("query") for v in json.loads(text)["templating"]["list"]}
        assert variables["runbooks"] == page


def test_nothing_of_the_prometheus_operator_is_made_unasked() -> None:
    assert not [one for one in helm.objects() if one["apiVersion"].startswith("monitoring.coreos.com/")]


def test_the_notes_name_three_commands_for_this_release() -> None:
    options = ("--dry-run=client", "--kubeconfig", "/nowhere", "--namespace", "training")
    notes = helm.helm("install", "other", str(helm.CHART), *options).partition("NOTES:")[2]
    assert [line.split()[0] for line in notes.splitlines() if line.startswith("  ")] == ["kubectl", "helm", "kubectl"]
    assert "helm test other --namespace training" in notes
    assert "deployment/other-surefoot-operator" in notes


@pytest.mark.parametrize(
    ("values", "verbs"),
    [
        ({}, {("nodes/status", "patch")}),
        ({"enabled": False}, set()),
        ({"enabled": False, "taint": "NoSchedule"}, set()),
        ({"taint": "NoSchedule"}, {("nodes/status", "patch"), ("nodes", "patch")}),
    ],
)
def test_the_operator_may_write_of_nodes_just_what_it_is_to_tell(values: Object, verbs: set[tuple[str, str]]) -> None:
    rendered = helm.objects({"operator": {"nodeReports": values}})
    found = {
        (what, verb)
        for _, rule in rules(rendered)
        for what in rule["resources"]
        for verb in rule["verbs"]
        if what.partition("/")[0] == "nodes" and verb not in ("get", "list", "watch")
    }
    assert found == verbs


@pytest.mark.parametrize(
    ("values", "webhooks", "node_verbs"),
    [
        ({}, [], set()),
        ({"jobs": {"enabled": True}}, ["trainingjobs.surefoot.dev"], set()),
        ({"evictions": {"enabled": True}}, ["evictions.surefoot.dev"], {"get"}),
    ],
)
def test_the_api_server_asks_only_what_a_value_asks_for(
    values: Object, webhooks: list[str], node_verbs: set[str]
) -> None:
    rendered = helm.objects({"operator": {"admission": values}})
    found = [hook for one in rendered if one["kind"] == "ValidatingWebhookConfiguration" for hook in one["webhooks"]]
    assert [hook["name"] for hook in found] == webhooks
    verbs = {verb for _, rule in rules(rendered) if rule["resources"] == ["nodes"] for verb in rule["verbs"]}
    assert verbs - {"list", "watch"} == node_verbs
    operator = helm.one(rendered, "Deployment", "surefoot-operator")["spec"]["template"]
    assert ("admission" in ports(operator)) == bool(webhooks)


def test_what_the_api_server_asks_finds_the_port_that_answers() -> None:
    rendered = helm.objects(EVERYTHING)
    [configuration] = [one for one in rendered if one["kind"] == "ValidatingWebhookConfiguration"]
    for hook in configuration["webhooks"]:
        told = hook["clientConfig"]["service"]
        service = helm.one(rendered, "Service", told["name"])
        assert told["namespace"] == service["metadata"]["namespace"]
        assert told["port"] in [one["port"] for one in service["spec"]["ports"]]
        assert (hook["failurePolicy"], hook["sideEffects"], hook["timeoutSeconds"]) == ("Ignore", "None", 2)
        assert hook["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "training"}}


@pytest.mark.parametrize(
    ("gangs", "groups"),
    [
        ([], set()),
        (["Coscheduling"], {"scheduling.x-k8s.io"}),
    ],
)
def test_the_operator_may_write_pod_groups_of_just_the_schedulers_that_are_named(
    gangs: list[str], groups: set[str]
) -> None:
    rendered = helm.objects({"operator": {"gangSchedulers": gangs}})
    found = [rule for _, rule in rules(rendered) if "podgroups" in rule["resources"]]
    assert {name for rule in found for name in rule["apiGroups"]} == groups
    assert all(rule["verbs"] == ["get", "list", "watch", "create", "patch", "delete"] for rule in found)
    assert all(rule["resources"] == ["podgroups"] for rule in found)
