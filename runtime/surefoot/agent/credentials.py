"""Reads the agent's token and the certificate authority that verifies the coordinator.

A kubelet renews the token's file while the pod lives, so it is read at each connection and never kept. Built by the
agent process from its settings; `coordinator_client` asks for both.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from surefoot.errors import ConfigurationError, SurefootError
from surefoot.settings import AgentSettings

_TOKEN_BYTES = 1 << 16


class NoToken(SurefootError):
    """The token's file cannot be read now; a later try may succeed."""


def token(settings: AgentSettings) -> str:
    """Reads the token: from its file if there is one, else fixed."""
    if not settings.token_file:
        return settings.token
    try:
        with Path(settings.token_file).open("rb") as file:
            found = file.read(_TOKEN_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NoToken(
            f"the token cannot be read from {settings.token_file} (SUREFOOT_TOKEN_FILE): {error}; "
            "is the projected service-account token mounted there, and readable by this user?"
        ) from error
    if not found:
        raise NoToken(f"{settings.token_file} (SUREFOOT_TOKEN_FILE) is empty: no token was projected into it yet")
    return found


def trust(settings: AgentSettings) -> ssl.SSLContext | None:
    """Trusts the given authority alone, names checked; None: the system's authorities."""
    if not settings.coordinator_ca:
        return None
    if not settings.coordinator_url.startswith("wss://"):
        raise ConfigurationError(
            f"SUREFOOT_COORDINATOR_CA is set, but SUREFOOT_COORDINATOR_URL is {settings.coordinator_url!r}: only wss:// "
            "is verified, and a token never goes out in clear; correct the URL, or leave the authority out"
        )
    try:
        # with an authority given, none of the system's is loaded; names are checked
        return ssl.create_default_context(cadata=settings.coordinator_ca)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            f"SUREFOOT_COORDINATOR_CA is not a certificate in PEM form: {error}; it is the text of ca.crt in the "
            "operator's TLS secret"
        ) from error
