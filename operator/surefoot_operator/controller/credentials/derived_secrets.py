"""Derives every secret of a local run from one stored root.

The file is readable by its owner alone; nothing of it ever stands on a command line or in a log.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets as random_secrets
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.holder import Credentials
from surefoot_operator.errors import FabricError
from surefoot_operator.fabric.processes.run_folder import create_json, read_json

FILE = "operator.json"
_BYTES = 32


@dataclass(frozen=True, slots=True)
class Secrets:
    """One root, and a secret for each purpose: who knows one of them cannot tell another."""

    root: bytes = field(repr=False)

    def worker_token(self, job: str, index: int, attempt: int) -> str:
        """What worker (index, attempt) shows to the coordinator."""
        return self._derived(f"worker:{job}:{index}:{attempt}")

    def epoch_token(self, job: str, epoch: int) -> str:
        """What the members of an epoch share: each leader tells the same to whoever joins late, and nobody stores it."""
        return self._derived(f"epoch:{job}:{epoch}")

    def holder_account(self, job: str) -> Credentials:
        """The job's account on every holder."""
        return Credentials(f"job-{job}", self._derived(f"holder:{job}"))

    def _derived(self, purpose: str) -> str:
        return hmac.new(self.root, purpose.encode(), hashlib.sha256).hexdigest()


def secrets_in(folder: Path) -> Secrets:
    """The run's secrets, made at the first call. Raises FabricError if the file is damaged."""
    path = folder / FILE
    # where it is there, it is of the operator before us: its workers know what follows from it
    create_json(path, {"root": random_secrets.token_hex(_BYTES)})
    try:
        return Secrets(bytes.fromhex((read_json(path) or {})["root"]))
    except (ValueError, KeyError, TypeError) as error:
        raise FabricError(f"{path} is damaged: start the run anew, in another folder") from error
