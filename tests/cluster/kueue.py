"""Real Kueue beside the cluster: its manager as a process of the host, its kinds, and its webhooks for pods and its own kinds.

Built from the Go module proxy (`binaries.kueue`). Its certificate is made by itself, put into a Secret, and brought from there to its
folder here, as a kubelet would mount it.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from cluster import binaries
from cluster.api import Api
from cluster.engine import Engine
from cluster.operator_process import free_port
from cluster.processes import wait

NAMESPACE = "kueue-system"
SERVICE, SECRET = "kueue-webhook-service", "kueue-webhook-server-cert"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
HOOKS = "/apis/admissionregistration.k8s.io/v1"
QUEUES = "/apis/kueue.x-k8s.io/v1beta2"
SECONDS = 120.0
_CONVERTED = ("localqueues", "clusterqueues", "workloads", "cohorts", "multikueueclusters")
"""Kinds whose older version its webhook converts; it does not start before they say so."""
_OWN = ("pod", "clusterqueue", "resourceflavor", "workload", "cohort")

Object = dict[str, Any]


@dataclass
class Kueue:
    """One manager, for the pods of `namespace` alone."""

    engine: Engine
    api: Api
    folder: Path
    namespace: str
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / "kueue.log"

    def start(self) -> Kueue:
        """Returns once it gates pods."""
        self.stop()
        self.api.create("/api/v1/namespaces", _named("v1", "Namespace", NAMESPACE))
        for path in binaries.kueue_crds():
            self.api.create(CRDS, _converted(yaml.safe_load(path.read_text(encoding="utf-8"))))
        self._serve()
        certificates = self.folder / "certificates"
        certificates.mkdir()
        config = self.folder / "config.json"
        config.write_text(json.dumps(self._config(certificates)))
        kubeconfig = str(self.engine.facts().kubeconfig)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [str(binaries.kueue()), f"--config={config}", "--feature-gates=VisibilityOnDemand=false"],
                stdout=output,
                stderr=output,
                env={**os.environ, "KUBECONFIG": kubeconfig},
            )
        assert wait(lambda: self._mounted(certificates), SECONDS), self.words()
        assert wait(self._gates, SECONDS), self.words()
        return self

    def queue(self, name: str, quota: Object) -> None:
        """A LocalQueue with a ClusterQueue of its own, in which pods of higher priority take the place of others."""
        flavors = [{"name": name, "resources": [{"name": kind, "nominalQuota": much} for kind, much in quota.items()]}]
        spec = {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [{"coveredResources": list(quota), "flavors": flavors}],
        }
        version = QUEUES.removeprefix("/apis/")
        self.api.create(f"{QUEUES}/resourceflavors", {**_named(version, "ResourceFlavor", name), "spec": {}})
        self.api.create(f"{QUEUES}/clusterqueues", {**_named(version, "ClusterQueue", name), "spec": spec})
        local = {**_named(version, "LocalQueue", name), "spec": {"clusterQueue": name}}
        self.api.create(f"{QUEUES}/namespaces/{self.namespace}/localqueues", local)

    def words(self) -> str:
        return self.log.read_text(encoding="utf-8")[-4000:] if self.log.exists() else ""

    def stop(self) -> None:
        """Takes its webhooks away first: without it they would refuse every pod."""
        for kind in ("mutating", "validating"):
            path = f"{HOOKS}/{kind}webhookconfigurations/kueue-{kind}-webhook-configuration"
            if self.api.answers(path):
                self.api.call("DELETE", path)
        if self.process is not None:
            self.process.kill()
            self.process.wait(10.0)
            self.process = None

    def remove(self) -> None:
        """Everything of it, also what its finalizers hold."""
        self.stop()
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        for pod in self.api.call("GET", pods)["items"]:
            self.api.merge(f"{pods}/{pod['metadata']['name']}", {"metadata": {"finalizers": None}})
        for kind in ("workloads", "localqueues", "clusterqueues", "resourceflavors"):
            for one in self.api.call("GET", f"{QUEUES}/{kind}")["items"]:
                place = one["metadata"].get("namespace")
                path = f"{QUEUES}/namespaces/{place}/{kind}" if place else f"{QUEUES}/{kind}"
                self.api.merge(f"{path}/{one['metadata']['name']}", {"metadata": {"finalizers": None}})
        for path in binaries.kueue_crds():
            name = yaml.safe_load(path.read_text(encoding="utf-8"))["metadata"]["name"]
            if self.api.answers(f"{CRDS}/{name}"):
                self.api.call("DELETE", f"{CRDS}/{name}")
        path = f"/api/v1/namespaces/{NAMESPACE}"
        self.api.call("DELETE", path)
        assert wait(lambda: not self.api.answers(path), SECONDS)

    def _config(self, certificates: Path) -> Object:
        return {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": NAMESPACE,
            "health": {"healthProbeBindAddress": f"127.0.0.1:{free_port()}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"port": self.port, "certDir": str(certificates)},
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"qps": 50, "burst": 100},
            "internalCertManagement": {"enable": True, "webhookServiceName": SERVICE, "webhookSecretName": SECRET},
            "integrations": {"frameworks": ["pod"]},
        }

    def _serve(self) -> None:
        """A Service that leads to this machine, at the address of its API server, and the webhooks behind it."""
        body = yaml.safe_load(self.engine.facts().kubeconfig.read_text())
        host = str(urlsplit(body["clusters"][0]["cluster"]["server"]).hostname)
        core = f"/api/v1/namespaces/{NAMESPACE}"
        self.api.create(f"{core}/secrets", _named("v1", "Secret", SECRET))
        ports = [{"name": "https", "port": 443, "targetPort": self.port, "protocol": "TCP"}]
        self.api.create(f"{core}/services", {**_named("v1", "Service", SERVICE), "spec": {"ports": ports}})
        ends = {
            **_named("discovery.k8s.io/v1", "EndpointSlice", SERVICE),
            "addressType": "IPv4",
            "endpoints": [{"addresses": [host], "conditions": {"ready": True}}],
            "ports": [{"name": "https", "port": self.port, "protocol": "TCP"}],
        }
        ends["metadata"]["labels"] = {"kubernetes.io/service-name": SERVICE}
        self.api.create(f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices", ends)
        for hooks in yaml.safe_load_all(binaries.kueue_webhooks().read_text(encoding="utf-8")):
            kind = "mutating" if hooks["kind"].startswith("Mutating") else "validating"
            hooks["metadata"] = {"name": f"kueue-{kind}-webhook-configuration"}
            hooks["webhooks"] = [self._hook(one) for one in hooks["webhooks"] if one["name"][1:].split(".")[0] in _OWN]
            self.api.create(f"{HOOKS}/{kind}webhookconfigurations", hooks)

    def _hook(self, hook: Object) -> Object:
        made = copy.deepcopy(hook)
        made["clientConfig"]["service"] |= {"name": SERVICE, "namespace": NAMESPACE}
        if made["name"][1:].startswith("pod."):
            here = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": [self.namespace]}
            made["namespaceSelector"] = {"matchExpressions": [here]}
        return made

    def _mounted(self, folder: Path) -> bool:
        data = self.api.call("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/{SECRET}").get("data") or {}
        for name in ("ca.crt", "tls.key", "tls.crt"):
            if name in data:
                (folder / name).write_bytes(base64.b64decode(data[name]))
        return "tls.crt" in data

    def _gates(self) -> bool:
        """Whether a pod that names a queue would be gated: tried, not made."""
        pod = _named("v1", "Pod", "tried")
        pod["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "any"}
        pod["spec"] = {"containers": [{"name": "main", "image": "none"}]}
        try:
            made = self.api.call("POST", f"/api/v1/namespaces/{self.namespace}/pods?dryRun=All", pod)
        except OSError:
            return False
        return bool(made["spec"].get("schedulingGates"))


def _named(version: str, kind: str, name: str) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}}


def _converted(crd: Object) -> Object:
    if crd["spec"]["names"]["plural"] in _CONVERTED:
        service = {"name": SERVICE, "namespace": NAMESPACE, "path": "/convert"}
        hook = {"clientConfig": {"service": service}, "conversionReviewVersions": ["v1"]}
        crd["spec"]["conversion"] = {"strategy": "Webhook", "webhook": hook}
    return crd
