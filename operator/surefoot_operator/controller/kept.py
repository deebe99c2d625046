"""Secrets that the operator makes for itself: read, or made by whoever is first. Every replica ends with the same.

Touches the API server. Called by the cluster's composition root. A Secret that is there already, of whatever origin,
is used as it is.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Mapping
from typing import Any

from surefoot_operator.errors import FabricError
from surefoot_operator.fabric.kubernetes.api import Api, ApiRefused
from surefoot_operator.fabric.kubernetes.labels import MANAGED_BY, OPERATOR, core_path

log = logging.getLogger(__name__)

Content = Mapping[str, bytes]


async def kept_secret(
    api: Api, namespace: str, name: str, make: Callable[[], Content], kind: str = "Opaque"
) -> Content:
    """The content of Secret `name`; `make` gives it if there is none. Raises FabricError."""
    path = core_path(namespace, "secrets", name)
    found = await _read(api, path)
    if found is None:
        content = make()
        try:
            await api.post(core_path(namespace, "secrets"), _body(name, content, kind))
        except ApiRefused as error:
            if error.code == 404:
                raise FabricError(f"there is no namespace {namespace}: kubectl create namespace {namespace}") from error
            if error.code != 409:
                raise
            found = await _read(api, path)  # another replica was faster: what it made counts
            if found is None:
                raise FabricError(f"secret {namespace}/{name} was made and deleted at once; try again") from error
        else:
            log.info("secret %s/%s was made", namespace, name)
            return dict(content)
    return _content(found, f"{namespace}/{name}")


async def _read(api: Api, path: str) -> dict[str, Any] | None:
    try:
        return await api.get(path)
    except ApiRefused as error:
        if error.code == 404:
            return None
        raise


def _body(name: str, content: Content, kind: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": kind,
        "metadata": {"name": name, "labels": {MANAGED_BY: OPERATOR}},
        "data": {key: base64.b64encode(value).decode("ascii") for key, value in content.items()},
    }


def _content(found: dict[str, Any], where: str) -> Content:
    try:
        return {key: base64.b64decode(text, validate=True) for key, text in (found.get("data") or {}).items()}
    except (binascii.Error, TypeError) as error:
        raise FabricError(f"secret {where} is damaged: delete it, and a new one is made") from error
