"""Derives the secrets of jobs and workers from one stored root.

The root is in a file that only its owner can read, or in a Secret. It is never on a command line or in a log.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets as random_secrets
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.memory_server import Credentials
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.local.run_folder import create_json, read_json

FILE = "operator.json"
_BYTES = 32


@dataclass(frozen=True, slots=True)
class Secrets:
    """Derives a secret for each purpose; no secret reveals another."""

    root: bytes = field(repr=False)
    """The root that all secrets derive from."""

    def worker_token(self, job: str, index: int, attempt: int) -> str:
        """Returns the token that worker (index, attempt) presents to the coordinator."""
        return self._derive(f"worker:{job}:{index}:{attempt}")

    def generation_token(self, job: str, generation: int) -> str:
        """Returns the secret that the members of a generation share.

        It is derived and not stored, so that every leader gives the same to a member that joins late.
        """
        return self._derive(f"epoch:{job}:{generation}")

    def memory_account(self, job: str) -> Credentials:
        """Returns the job's account on every memory server."""
        return Credentials(f"job-{job}", self._derive(f"holder:{job}"))

    def _derive(self, purpose: str) -> str:
        return hmac.new(self.root, purpose.encode(), hashlib.sha256).hexdigest()


def load_or_create_secrets(folder: Path) -> Secrets:
    """Reads or creates the secrets of a run. Raises PlatformError if their file is corrupt."""
    path = folder / FILE
    # Keep an existing file: workers of a former operator have secrets that derive from it.
    create_json(path, {"root": random_secrets.token_hex(_BYTES)})
    try:
        return Secrets(bytes.fromhex((read_json(path) or {})["root"]))
    except (ValueError, KeyError, TypeError) as error:
        raise PlatformError(f"{path} is corrupt: start the run again in another folder") from error
