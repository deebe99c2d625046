"""`python -m surefoot.tools.check_tier`: writes, reads and deletes one small object in a persistent tier.

Which tier comes by environment (SUREFOOT_PERSISTENT_URI, …), so that credentials stand on no command line. What is written lies below
`.probe-…` and is gone afterwards, also where reading it failed. Prints one line of JSON: {"place", "write_seconds", "read_seconds",
"delete_seconds"}, or {"problem", "step"}: which of them failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from typing import Any

from surefoot.errors import ConfigurationError, SurefootError
from surefoot.settings import job_settings
from surefoot.tiers.object_store import ObjectStore
from surefoot.tiers.persistent import open_store

_BYTES = 4096


def check_tier(store: ObjectStore, name: str) -> dict[str, Any]:
    """Writes, reads and deletes an object below `.probe-NAME`."""
    folder, data = f".probe-{name}", os.urandom(_BYTES)
    found: dict[str, Any] = {"place": store.location}
    step, began = "write", time.monotonic()
    try:
        try:
            store.put(f"{folder}/object", data)
            found["write_seconds"] = time.monotonic() - began
            step, began = "read", time.monotonic()
            if store.read(f"{folder}/object") != data:
                return {**found, "step": step, "problem": "other bytes are read than were written"}
            found["read_seconds"] = time.monotonic() - began
        finally:
            if step == "read":
                began = time.monotonic()
                store.remove_folder(folder)
                found["delete_seconds"] = time.monotonic() - began
    except SurefootError as error:
        failed = "delete" if "read_seconds" in found and "delete_seconds" not in found else step
        return {**found, "step": failed, "problem": str(error)}
    return found


def main() -> int:
    try:
        settings = job_settings({**os.environ, "SUREFOOT_JOB_UID": "probe"}).persistent
        if settings is None:
            raise ConfigurationError("SUREFOOT_PERSISTENT_URI is not set: it names the tier to probe")
        store = open_store(settings, create_root=True)
        try:
            body = check_tier(store, uuid.uuid4().hex)
        finally:
            store.close()
    except SurefootError as error:
        body = {"step": "open", "problem": str(error)}
    print(json.dumps(body))
    return 1 if "problem" in body else 0


if __name__ == "__main__":
    sys.exit(main())
