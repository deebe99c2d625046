"""A few calls to the API server over plain HTTPS, from a kubeconfig; waits are built on it. No client library: `up` must be light."""

from __future__ import annotations

import base64
import io
import json
import ssl
import tempfile
from collections.abc import Iterator
from datetime import datetime
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import yaml

from cluster.errors import ClusterError
from cluster.processes import wait

CALL_SECONDS = 5.0
_TYPES = {"PATCH": "application/merge-patch+json"}


class Api:
    """One cluster's API server and the identity a kubeconfig gives."""

    def __init__(self, kubeconfig: Path) -> None:
        body = yaml.safe_load(kubeconfig.read_text())
        cluster, user = body["clusters"][0]["cluster"], body["users"][0]["user"]
        self._url = cluster["server"]
        authority = cluster.get("certificate-authority-data")
        self._tls = ssl.create_default_context(
            cafile=cluster.get("certificate-authority"),
            cadata=base64.b64decode(authority).decode() if authority else None,
        )
        # the API server signs its own certificate, without the key identifiers that strict checking wants
        self._tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if "token" in user:
            self._headers["Authorization"] = f"Bearer {user['token']}"
        else:
            self._use_certificate(user)

    def _use_certificate(self, user: dict[str, str]) -> None:
        with tempfile.NamedTemporaryFile("wb") as pair:  # the ssl module reads certificates from files only
            pair.write(base64.b64decode(user["client-certificate-data"]))
            pair.write(base64.b64decode(user["client-key-data"]))
            pair.flush()
            self._tls.load_cert_chain(pair.name)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The parsed answer; HTTPError and URLError are the caller's."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": _TYPES.get(method, "application/json")}
        request = Request(self._url + path, data=data, headers=headers, method=method)
        with self._open(request, CALL_SECONDS) as answer:
            text = answer.read()
        return json.loads(text) if text[:1] in (b"{", b"[") else text.decode()

    def _open(self, request: Request, seconds: float) -> HTTPResponse:
        try:
            answer = urlopen(request, timeout=seconds, context=self._tls)
        except HTTPError as error:
            with error:  # its connection stays open until somebody happens to collect the error
                text = error.read()
            raise HTTPError(error.url, error.code, error.msg, error.headers, io.BytesIO(text)) from None
        assert isinstance(answer, HTTPResponse)
        return answer

    def merge(self, path: str, body: dict[str, Any]) -> Any:
        """Changes what the body names and nothing else."""
        return self.call("PATCH", path, body)

    def lines(self, path: str, quiet_seconds: float) -> Iterator[Any]:
        """What a watch says, line by line, until the server ends it or is silent for too long (an OSError)."""
        with self._open(Request(self._url + path, headers=self._headers), quiet_seconds) as answer:
            while line := answer.readline():
                yield json.loads(line)

    def create(self, path: str, body: dict[str, Any]) -> None:
        """Makes an object; one that is there already is left as it is."""
        try:
            self.call("POST", path, body)
        except HTTPError as error:
            if error.code != 409:
                raise ClusterError(f"POST {path}: {error.code} {error.read().decode()[-500:]}") from None

    def found(self, path: str) -> dict[str, Any]:
        """The object, empty where there is none: one question, for it may go between two."""
        try:
            return dict(self.call("GET", path))
        except HTTPError as error:
            if error.code != 404:
                raise
            return {}

    def answers(self, path: str = "/readyz") -> bool:
        """Whether the server is up and says so."""
        try:
            self.call("GET", path)
        except (HTTPError, URLError, OSError):
            return False
        return True

    def ready_nodes(self) -> dict[str, bool]:
        """Node name → Ready; empty while the server does not answer."""
        try:
            items = self.call("GET", "/api/v1/nodes")["items"]
        except (HTTPError, URLError, OSError):
            return {}
        return {item["metadata"]["name"]: _is_ready(item) for item in items}

    def heard_of(self, node: str) -> datetime | None:
        """When the node's kubelet last renewed its lease; None while that cannot be known."""
        try:
            lease = self.call("GET", f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{node}")
        except (HTTPError, URLError, OSError):
            return None
        return datetime.fromisoformat(lease["spec"]["renewTime"].replace("Z", "+00:00"))

    def wait_ready(self, names: list[str], seconds: float, since: datetime | None = None) -> None:
        """Until these nodes are Ready, and were heard of since then: what the server believes may be a minute old."""

        def all_ready() -> bool:
            ready = self.ready_nodes()
            return all(ready.get(name) and self._was_heard(name, since) for name in names)

        if not wait(all_ready, seconds):
            raise ClusterError(f"nodes are not Ready after {seconds:.0f} s: {self.ready_nodes()}; read the logs")

    def _was_heard(self, name: str, since: datetime | None) -> bool:
        if since is None:
            return True
        heard = self.heard_of(name)
        return heard is not None and heard >= since


def _is_ready(node: dict[str, Any]) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
