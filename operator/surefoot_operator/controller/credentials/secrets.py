"""Gets or creates the operator's own Secrets, safely with several replicas.

Touches the API server; called by the composition root. An existing Secret, whatever its origin, is used as it is.
"""

from __future__ import annotations

import base64
import binascii
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import MANAGED_BY, OPERATOR, ApiError, core_path

log = logging.getLogger(__name__)

Content = Mapping[str, bytes]
_TRIES = 3
ROOT, PASSWORD = "root", "password"
_BYTES = 32


@dataclass(frozen=True, slots=True)
class SecretRef:
    namespace: str
    name: str

    @property
    def path(self) -> str:
        return core_path(self.namespace, "secrets", self.name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


async def load_or_create_secret(
    api: Api, where: SecretRef, make: Callable[[], Content], kind: str = "Opaque"
) -> Content:
    """Reads a Secret, or creates it from `make`. Raises FabricError."""
    found = await _read(api, where)
    if found is None:
        content = make()
        try:
            await api.post(core_path(where.namespace, "secrets"), _body(where.name, content, kind))
        except ApiError as error:
            if error.code == 404:
                raise PlatformError(
                    f"there is no namespace {where.namespace}: kubectl create namespace {where.namespace}"
                ) from error
            if error.code != 409:
                raise
            found = await _read(api, where)  # another replica was faster: what it made counts
            if found is None:
                raise PlatformError(f"secret {where} was created by another replica and deleted at once") from error
        else:
            log.info("created secret %s", where)
            return dict(content)
    return _content(found, where)


async def root_key(api: Api, where: SecretRef) -> bytes:
    """Reads or creates the key that secrets derive from. Raises FabricError."""
    found = await load_or_create_secret(api, where, lambda: {ROOT: secrets.token_bytes(_BYTES)})
    if len(found.get(ROOT, b"")) < _BYTES:
        raise PlatformError(
            f"secret {where} needs {_BYTES} bytes or more under `{ROOT}`; delete it, and a new one is created"
        )
    return found[ROOT]


async def admin_password(api: Api, where: SecretRef) -> str:
    """Reads or creates the operator's password on holders. Raises FabricError.

    Holders read the same Secret.
    """
    # hexadecimal: a line of redis.conf can hold it
    found = await load_or_create_secret(api, where, lambda: {PASSWORD: secrets.token_hex(_BYTES).encode()})
    try:
        password = found.get(PASSWORD, b"").decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise PlatformError(f"secret {where}: `{PASSWORD}` is not ASCII text") from error
    if not password:
        raise PlatformError(f"secret {where} has no `{PASSWORD}`; delete it, and a new one is created")
    return password


async def replaced_secret(api: Api, where: SecretRef, change: Callable[[Content], Content | None]) -> Content:
    """Replaces a Secret's content by compare-and-swap. Raises FabricError.

    `change` returns None to keep it; it is called again where another replica wrote in between.
    """
    for _ in range(_TRIES):
        found = await _read(api, where)
        if found is None:
            raise PlatformError(f"secret {where} was deleted; it is created again at the next check")
        new = change(_content(found, where))
        if new is None:
            return _content(found, where)
        try:
            await api.put(where.path, {**found, "data": _encoded(new)})  # with the version that was read
        except ApiError as error:
            if error.code != 409:
                raise
        else:
            return dict(new)
    raise PlatformError(f"secret {where} was changed by others {_TRIES} times in a row; tried again later")


async def _read(api: Api, where: SecretRef) -> dict[str, Any] | None:
    try:
        return await api.get(where.path)
    except ApiError as error:
        if error.code == 404:
            return None
        raise


def _body(name: str, content: Content, kind: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": kind,
        "metadata": {"name": name, "labels": {MANAGED_BY: OPERATOR}},
        "data": _encoded(content),
    }


def _encoded(content: Content) -> dict[str, str]:
    return {key: base64.b64encode(value).decode("ascii") for key, value in content.items()}


def _content(found: Mapping[str, Any], where: SecretRef) -> Content:
    try:
        return {key: base64.b64decode(text, validate=True) for key, text in (found.get("data") or {}).items()}
    except (binascii.Error, TypeError) as error:
        raise PlatformError(f"secret {where} is damaged: delete it, and a new one is created") from error
