"""Gets or creates the root key and the holders' admin password."""

from __future__ import annotations

import secrets as random_secrets

from surefoot_operator.controller.credentials.secret_store import SecretAt, kept_secret
from surefoot_operator.errors import FabricError
from surefoot_operator.fabric.kubernetes.api import Api

ROOT, PASSWORD = "root", "password"
_BYTES = 32


async def root_key(api: Api, where: SecretAt) -> bytes:
    """What every job's account follows from. Raises FabricError."""
    found = await kept_secret(api, where, lambda: {ROOT: random_secrets.token_bytes(_BYTES)})
    if len(found.get(ROOT, b"")) < _BYTES:
        raise FabricError(f"secret {where} needs {_BYTES} bytes or more under `{ROOT}`; delete it, and it is made")
    return found[ROOT]


async def admin_password(api: Api, where: SecretAt) -> str:
    """Holders read the same Secret. Raises FabricError."""
    # hexadecimal: a line of redis.conf can hold it
    found = await kept_secret(api, where, lambda: {PASSWORD: random_secrets.token_hex(_BYTES).encode()})
    try:
        password = found.get(PASSWORD, b"").decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise FabricError(f"secret {where}: `{PASSWORD}` is not ASCII text") from error
    if not password:
        raise FabricError(f"secret {where} has no `{PASSWORD}`; delete it, and it is made")
    return password
