"""Derives every secret of a local run from one stored root.

The file is readable by its owner alone; nothing of it ever stands on a command line or in a log.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets as random_secrets
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.holder import Credentials
from surefoot_operator.errors import FabricError

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
    fresh = random_secrets.token_hex(_BYTES)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f'{{"root":"{fresh}"}}')
    try:
        os.link(scratch, path)
    except FileExistsError:
        pass  # made by the operator before us: its workers know what follows from it
    finally:
        os.unlink(scratch)
    text = path.read_text(encoding="ascii")
    root = text.removeprefix('{"root":"').removesuffix('"}')
    try:
        return Secrets(bytes.fromhex(root))
    except ValueError as error:
        raise FabricError(f"{path} is damaged: start the run anew, in another folder") from error
