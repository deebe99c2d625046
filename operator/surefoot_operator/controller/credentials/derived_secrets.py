"""Derives the secrets of jobs and workers from one stored root.

The root is a file readable by its owner alone, or a Secret; it is never on a command line or in a log.
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
    """Derives a secret for each purpose; none of them reveals another."""

    root: bytes = field(repr=False)

    def worker_token(self, job: str, index: int, attempt: int) -> str:
        """The token that worker (index, attempt) presents to the coordinator."""
        return self._derived(f"worker:{job}:{index}:{attempt}")

    def generation_token(self, job: str, epoch: int) -> str:
        """The secret shared by an epoch's members.

        Derived, not stored: each leader gives the same to a member that joins late.
        """
        return self._derived(f"epoch:{job}:{epoch}")

    def memory_account(self, job: str) -> Credentials:
        """The job's account on every holder."""
        return Credentials(f"job-{job}", self._derived(f"holder:{job}"))

    def _derived(self, purpose: str) -> str:
        return hmac.new(self.root, purpose.encode(), hashlib.sha256).hexdigest()


def secrets_in(folder: Path) -> Secrets:
    """Reads or creates a run's secrets. Raises FabricError if damaged."""
    path = folder / FILE
    # where it is there, it is of the operator before us: its workers know what follows from it
    create_json(path, {"root": random_secrets.token_hex(_BYTES)})
    try:
        return Secrets(bytes.fromhex((read_json(path) or {})["root"]))
    except (ValueError, KeyError, TypeError) as error:
        raise PlatformError(f"{path} is damaged: start the run anew, in another folder") from error
