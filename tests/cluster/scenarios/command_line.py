"""`surefoot` as somebody types it who has a kubeconfig: in this process, as an interpreter and its imports take a second each."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from cluster.api import Api
from surefoot_operator.cli.main import main


@dataclass(frozen=True)
class Said:
    """What one command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def parsed(self) -> Any:
        """Of `-o json`."""
        return json.loads(self.out)


@dataclass(frozen=True)
class Person:
    """Somebody with rights in one namespace."""

    kubeconfig: Path
    namespace: str

    def types(self, *words: str) -> Said:
        """Runs `surefoot WORDS` with the kubeconfig and the namespace."""
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main([*words, "--kubeconfig", str(self.kubeconfig), "--namespace", self.namespace])
        return Said(code, out.getvalue(), err.getvalue())

    def gets(self, *words: str) -> str:
        """The output of a command that succeeds."""
        said = self.types(*words)
        assert said.code == 0, said
        return said.out


def person_with(api: Api, admin: Path, folder: Path, namespace: str, role: str) -> Person:
    """A new account of that namespace with one of Kubernetes' own roles there, and nothing else."""
    name = f"has-{role}"
    core, rights = f"/api/v1/namespaces/{namespace}", "rbac.authorization.k8s.io"
    api.create(f"{core}/serviceaccounts", {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    bound = {
        "apiVersion": f"{rights}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": rights, "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }
    api.create(f"/apis/{rights}/v1/namespaces/{namespace}/rolebindings", bound)
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = api.call("POST", f"{core}/serviceaccounts/{name}/token", asked)["status"]["token"]
    config = yaml.safe_load(admin.read_text(encoding="utf-8"))
    config["users"][0]["user"] = {"token": token}
    kubeconfig = folder / f"{name}.json"
    kubeconfig.write_text(json.dumps(config), encoding="utf-8")
    return Person(kubeconfig, namespace)
