"""Kubernetes, etcd, CoreDNS, helm, kind and pause as programs, built once from the Go module proxy into the user's cache.

`control_plane.py`, `node.py` and `images.py` ask for paths. Builds run under a lock, at low priority, and appear whole or not at all.
KUBEBUILDER_ASSETS is honoured when it holds all six Kubernetes programs: mixed minor versions are not supported.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster import layout
from cluster.errors import ClusterError

KUBERNETES = "v1.35.4"
COREDNS = "v1.14.4"
ETCD = "v3.6.6"
HELM = "v4.3.1"
PAUSE = "pause-1"
KIND = "v0.32.0"
REGISTRY = "v3.1.2"
KWOK = "v0.8.0"
PROMETHEUS_OPERATOR = "v0.85.0"
SCHEDULER_PLUGINS = "v0.35.4-devel"
"""Of the minor version of KUBERNETES: the plugins are compiled into kube-scheduler."""
KUEUE = "v0.17.0"
KUBERNETES_PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
)
BUILD_SECONDS = 3600

PAUSE_SOURCE = """// Holds the namespaces of a pod or a node and collects orphans.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGCHLD, syscall.SIGTERM, syscall.SIGINT)
	for {
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 && err != syscall.EINTR {
				break
			}
		}
		if <-signals != syscall.SIGCHLD {
			os.Exit(0)
		}
	}
}
"""


GANG_SCHEDULER_SOURCE = """// kube-scheduler with the plugin that holds pods back until their whole group fits.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	_ "sigs.k8s.io/scheduler-plugins/apis/config/scheme"
	"sigs.k8s.io/scheduler-plugins/pkg/coscheduling"
)

func main() {
	os.Exit(cli.Run(app.NewSchedulerCommand(app.WithPlugin(coscheduling.Name, coscheduling.New))))
}
"""


def unbuilt() -> list[str]:
    """What the cache lacks."""
    names = [f"coredns-{COREDNS}", f"helm-{HELM}", PAUSE]
    names += [] if _assets() else [f"kubernetes-{KUBERNETES}"]
    return [name for name in names if not (layout.CACHE / name).is_dir()]


def _assets() -> Path | None:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets and all(os.access(Path(assets, name), os.X_OK) for name in KUBERNETES_PROGRAMS):
        return Path(assets)
    return None


def kubernetes_folder() -> Path:
    """The folder with kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy and kubectl."""
    name = f"kubernetes-{KUBERNETES}"
    return _assets() or _built(name, lambda folder: _build_kubernetes(folder, KUBERNETES_PROGRAMS))


def kubeadm() -> Path:
    """What makes a control plane inside of kind's nodes."""
    folder = _built(f"kubeadm-{KUBERNETES}", lambda folder: _build_kubernetes(folder, ("kubeadm",)))
    return folder / "kubeadm"


def etcd() -> Path:
    """For kubeadm, which wants a newer one than Debian has."""
    return (
        _built(f"etcd-{ETCD}", lambda folder: _build_tool(folder, "etcd", "go.etcd.io/etcd/server/v3", ETCD)) / "etcd"
    )


def coredns() -> Path:
    """The DNS server."""
    package = "github.com/coredns/coredns"
    return _built(f"coredns-{COREDNS}", lambda folder: _build_tool(folder, "coredns", package, COREDNS)) / "coredns"


def helm() -> Path:
    """For charts."""
    return _built(f"helm-{HELM}", lambda folder: _install(folder, f"helm.sh/helm/v4/cmd/helm@{HELM}")) / "helm"


def registry() -> Path:
    """A registry of images and charts: the one that Docker's own image runs."""
    package = "github.com/distribution/distribution/v3/cmd/registry"
    return (
        _built(f"registry-{REGISTRY}", lambda folder: _build_tool(folder, "registry", package, REGISTRY)) / "registry"
    )


def kwok() -> Path:
    """What keeps nodes and pods in the API server that no machine runs."""
    return _built(f"kwok-{KWOK}", lambda folder: _install(folder, f"sigs.k8s.io/kwok/cmd/kwok@{KWOK}")) / "kwok"


def kwok_stages() -> list[Path]:
    """What kwok has nodes and pods do: be Ready, run, and end when they are deleted."""
    folder = _source(f"sigs.k8s.io/kwok@{KWOK}") / "kustomize" / "stage"
    nodes = [folder / "node" / "fast" / "node-initialize.yaml", folder / "node" / "heartbeat" / "node-heartbeat.yaml"]
    return [*nodes, *sorted((folder / "pod" / "fast").glob("pod-*.yaml"))]


def prometheus_crds() -> list[Path]:
    """The kinds of the Prometheus operator that the chart makes objects of."""
    module = _source(f"github.com/prometheus-operator/prometheus-operator@{PROMETHEUS_OPERATOR}")
    folder = module / "example" / "prometheus-operator-crd"
    return [
        folder / f"monitoring.coreos.com_{kind}.yaml" for kind in ("servicemonitors", "podmonitors", "prometheusrules")
    ]


def gang_scheduler() -> Path:
    """kube-scheduler with the coscheduling plugin of scheduler-plugins."""
    return _built(f"gang-scheduler-{SCHEDULER_PLUGINS}", _build_gang_scheduler) / "gang-scheduler"


def pod_group_crd() -> Path:
    """The kind of the groups that the coscheduling plugin reads."""
    module = _source(f"sigs.k8s.io/scheduler-plugins@{SCHEDULER_PLUGINS}")
    return module / "config" / "crd" / "bases" / "scheduling.x-k8s.io_podgroups.yaml"


def kueue() -> Path:
    """The manager of Kueue's queues."""
    return _built(f"kueue-{KUEUE}", _build_kueue) / "kueue"


def kueue_crds() -> list[Path]:
    """The kinds of its queues, quotas and workloads."""
    return sorted((_source(f"sigs.k8s.io/kueue@{KUEUE}") / "config" / "components" / "crd" / "bases").glob("*.yaml"))


def kueue_webhooks() -> Path:
    """Its webhooks, as its own installation has them."""
    return _source(f"sigs.k8s.io/kueue@{KUEUE}") / "config" / "components" / "webhook" / "manifests.yaml"


def kind_source() -> Path:
    """kind's module, with the files of its node images."""
    return _source(f"sigs.k8s.io/kind@{KIND}")


def _source(module: str) -> Path:
    """A module's files, as the Go module proxy gives them."""
    layout.CACHE.mkdir(parents=True, exist_ok=True)
    return Path(json.loads(_go(layout.CACHE, "mod", "download", "-json", module))["Dir"])


def kind() -> Path:
    """From PATH, else built."""
    found = shutil.which("kind")
    if found:
        return Path(found)
    return _built(f"kind-{KIND}", lambda folder: _install(folder, f"sigs.k8s.io/kind@{KIND}")) / "kind"


def pause() -> Path:
    """A static program that waits and reaps: the first process of pods and of nodes."""
    return _built(PAUSE, _build_pause) / "pause"


def _built(name: str, build: Callable[[Path], None]) -> Path:
    """The cache's folder of that name; built first if it is not there. Whoever comes second waits for the first."""
    folder = layout.CACHE / name
    if folder.is_dir():
        return folder
    layout.CACHE.mkdir(parents=True, exist_ok=True)
    with (layout.CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        if shutil.which("go") is None:
            raise ClusterError(
                f"{name} must be built and there is no Go toolchain on PATH; install Go 1.25 or newer,"
                " or point KUBEBUILDER_ASSETS at a folder that holds " + ", ".join(KUBERNETES_PROGRAMS)
            )
        print(f"building {name}, once; minutes where the compiler's cache is cold", flush=True)
        half_made = folder.with_name(f"{name}.building")
        shutil.rmtree(half_made, ignore_errors=True)  # left by a build that was killed: we hold the lock
        half_made.mkdir()
        try:
            build(half_made)
            os.replace(half_made, folder)
        finally:
            shutil.rmtree(half_made, ignore_errors=True)
    return folder


def _build_kubernetes(folder: Path, programs: Sequence[str]) -> None:
    """A module of its own that pins each staging module to its published version."""
    module, published = "k8s.io/kubernetes", KUBERNETES.replace("v1.", "v0.")
    source = folder / "source"
    source.mkdir()
    _go(source, "mod", "init", "surefoot.dev/testcluster")
    downloaded = json.loads(_go(source, "mod", "download", "-json", f"{module}@{KUBERNETES}"))
    staging = re.findall(r"^\s*(k8s\.io/\S+) => \./staging/", Path(downloaded["GoMod"]).read_text(), re.MULTILINE)
    replacements = [f"-replace={name}={name}@{published}" for name in staging]
    _go(source, "mod", "edit", "-go=1.25.0", f"-require={module}@{KUBERNETES}", *replacements)
    packages = [f"{module}/cmd/{name}" for name in programs]
    imports = "".join(f'\t_ "{package}"\n' for package in packages)
    (source / "tools.go").write_text(f"//go:build tools\n\npackage tools\n\nimport (\n{imports})\n")
    _go(source, "mod", "tidy")
    stamp = "k8s.io/component-base/version"
    major, minor = KUBERNETES.removeprefix("v").split(".")[:2]
    flags = f"-s -w -X {stamp}.gitVersion={KUBERNETES} -X {stamp}.gitMajor={major} -X {stamp}.gitMinor={minor}"
    _go(source, "build", "-trimpath", "-ldflags", flags, "-o", f"{folder}/", *packages)
    shutil.rmtree(source)


def _build_gang_scheduler(folder: Path) -> None:
    source = _pinned_module(folder, "sigs.k8s.io/scheduler-plugins", SCHEDULER_PLUGINS)
    (source / "main.go").write_text(GANG_SCHEDULER_SOURCE)
    _go(source, "mod", "tidy")
    _go(source, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(folder / "gang-scheduler"), ".")
    shutil.rmtree(source)


def _build_kueue(folder: Path) -> None:
    module = "sigs.k8s.io/kueue"
    source = _pinned_module(folder, module, KUEUE)
    (source / "tools.go").write_text(f'//go:build tools\n\npackage tools\n\nimport _ "{module}/cmd/kueue"\n')
    _go(source, "mod", "tidy")
    _go(source, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(folder / "kueue"), f"{module}/cmd/kueue")
    shutil.rmtree(source)


def _pinned_module(folder: Path, module: str, version: str) -> Path:
    """A module that requires another one, with that one's replacements: its own hold only where it is built itself."""
    source = folder / "source"
    source.mkdir()
    _go(source, "mod", "init", "surefoot.dev/pinned")
    downloaded = json.loads(_go(source, "mod", "download", "-json", f"{module}@{version}"))
    text = Path(downloaded["GoMod"]).read_text()
    pinned = re.findall(r"^(?:replace )?\s*(\S+) => (\S+) (v\S+)$", text, re.MULTILINE)
    replacements = [f"-replace={name}={other}@{found}" for name, other, found in pinned]
    _go(source, "mod", "edit", f"-require={module}@{version}", *replacements)
    return source


def _build_tool(folder: Path, name: str, package: str, version: str) -> None:
    """A module of its own: the program's own replacements do not hold for `go install`."""
    source = folder / "source"
    source.mkdir()
    _go(source, "mod", "init", f"surefoot.dev/{name}")
    _go(source, "get", "-tool", f"{package}@{version}")
    _go(source, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(folder / name), package)
    shutil.rmtree(source)


def _build_pause(folder: Path) -> None:
    (folder / "pause.go").write_text(PAUSE_SOURCE)
    _go(folder, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(folder / "pause"), "pause.go")


def _install(folder: Path, package: str) -> None:
    _go(folder, "install", "-trimpath", "-ldflags", "-s -w", package)


def _go(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "CGO_ENABLED": "0", "GOBIN": str(folder), "GOFLAGS": "-buildvcs=false -modcacherw"}
    done = subprocess.run(
        ["nice", "-n", "19", "go", *arguments],
        check=False,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
    )
    if done.returncode != 0:
        raise ClusterError(f"`go {' '.join(arguments[:3])} …` failed: {done.stderr.strip()[-1500:]}")
    return done.stdout
