"""Reads or creates the operator's own Secrets, safely with several replicas.

Touches the API server; called by the composition root. An existing Secret of any origin is used as it is.
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
from surefoot_operator.platforms.kubernetes.api_objects import MANAGED_BY_LABEL, OPERATOR, ApiError, core_path

log = logging.getLogger(__name__)

Content = Mapping[str, bytes]
"""Decoded content of a Secret by key."""
_MAX_ATTEMPTS = 3
ROOT, PASSWORD = "root", "password"
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class SecretRef:
    """Namespace and name of a Secret."""

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
    """Reads a Secret, or creates it with the content that `make` returns. Raises PlatformError."""
    secret = await _read_secret(api, where)
    if secret is None:
        content = make()
        try:
            await api.post(core_path(where.namespace, "secrets"), _secret_body(where.name, content, kind))
        except ApiError as error:
            if error.code == 404:
                raise PlatformError(
                    f"namespace {where.namespace} does not exist: create it with kubectl create namespace {where.namespace}"
                ) from error
            if error.code != 409:
                raise
            # Another replica created it first: use its content.
            secret = await _read_secret(api, where)
            if secret is None:
                raise PlatformError(f"secret {where} was created by another replica and deleted at once") from error
        else:
            log.info("created secret %s", where)
            return dict(content)
    return _decode_content(secret, where)


async def load_root_key(api: Api, where: SecretRef) -> bytes:
    """Reads or creates the key that the jobs' secrets derive from. Raises PlatformError."""
    content = await load_or_create_secret(api, where, lambda: {ROOT: secrets.token_bytes(_SECRET_BYTES)})
    if len(content.get(ROOT, b"")) < _SECRET_BYTES:
        raise PlatformError(
            f"secret {where} needs at least {_SECRET_BYTES} bytes under `{ROOT}`; delete it, and it is created again"
        )
    return content[ROOT]


async def load_admin_password(api: Api, where: SecretRef) -> str:
    """Reads or creates the operator's password for memory servers, which read the same Secret. Raises PlatformError."""
    # In hexadecimal, which needs no quoting in redis.conf.
    content = await load_or_create_secret(api, where, lambda: {PASSWORD: secrets.token_hex(_SECRET_BYTES).encode()})
    try:
        password = content.get(PASSWORD, b"").decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise PlatformError(f"secret {where}: `{PASSWORD}` is not ASCII text") from error
    if not password:
        raise PlatformError(f"secret {where} has no `{PASSWORD}`; delete it, and it is created again")
    return password


async def replace_secret(api: Api, where: SecretRef, change: Callable[[Content], Content | None]) -> Content:
    """Replaces a Secret's content by compare-and-swap. Raises PlatformError.

    Args:
        api: The API server.
        where: The Secret.
        change: Takes the current content; returns the new one, or None to keep it. Called again if another replica
            wrote in between.

    Returns:
        The content that the Secret has now.
    """
    for _ in range(_MAX_ATTEMPTS):
        secret = await _read_secret(api, where)
        if secret is None:
            raise PlatformError(f"secret {where} was deleted; it is created again at the next check")
        new_content = change(_decode_content(secret, where))
        if new_content is None:
            return _decode_content(secret, where)
        try:
            await api.put(
                where.path, {**secret, "data": _encode_content(new_content)}
            )  # fails if the version that was read changed
        except ApiError as error:
            if error.code != 409:
                raise
        else:
            return dict(new_content)
    raise PlatformError(f"secret {where} was changed by others {_MAX_ATTEMPTS} times in a row; it is tried again later")


async def _read_secret(api: Api, where: SecretRef) -> dict[str, Any] | None:
    try:
        return await api.get(where.path)
    except ApiError as error:
        if error.code == 404:
            return None
        raise


def _secret_body(name: str, content: Content, kind: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": kind,
        "metadata": {"name": name, "labels": {MANAGED_BY_LABEL: OPERATOR}},
        "data": _encode_content(content),
    }


def _encode_content(content: Content) -> dict[str, str]:
    return {key: base64.b64encode(value).decode("ascii") for key, value in content.items()}


def _decode_content(secret: Mapping[str, Any], where: SecretRef) -> Content:
    try:
        return {key: base64.b64decode(text, validate=True) for key, text in (secret.get("data") or {}).items()}
    except (binascii.Error, TypeError) as error:
        raise PlatformError(f"secret {where} is corrupt: delete it, and it is created again") from error
