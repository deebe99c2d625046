"""`python -m surefoot.tools.check_tier`: writes, reads and deletes one small object in a persistent tier.

The environment names the tier (SUREFOOT_PERSISTENT_URI, …), so that no command line has credentials. The object is
below `.probe-…` and is deleted afterwards, even if reading it fails. Prints one line of JSON: {"place", "write_seconds",
"read_seconds", "delete_seconds"}, or {"problem", "step"} with the step that failed.
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
    result: dict[str, Any] = {"place": store.location}
    step, start_seconds = "write", time.monotonic()
    try:
        try:
            store.put(f"{folder}/object", data)
            result["write_seconds"] = time.monotonic() - start_seconds
            step, start_seconds = "read", time.monotonic()
            if store.read(f"{folder}/object") != data:
                return {**result, "step": step, "problem": "other bytes are read than were written"}
            result["read_seconds"] = time.monotonic() - start_seconds
        finally:
            if step == "read":
                start_seconds = time.monotonic()
                store.remove_folder(folder)
                result["delete_seconds"] = time.monotonic() - start_seconds
    except SurefootError as error:
        failed_step = "delete" if "read_seconds" in result and "delete_seconds" not in result else step
        return {**result, "step": failed_step, "problem": str(error)}
    return result


def main() -> int:
    try:
        settings = job_settings({**os.environ, "SUREFOOT_JOB_UID": "probe"}).persistent
        if settings is None:
            raise ConfigurationError("SUREFOOT_PERSISTENT_URI is not set: it names the tier to probe")
        store = open_store(settings, create_root=True)
        try:
            result = check_tier(store, uuid.uuid4().hex)
        finally:
            store.close()
    except SurefootError as error:
        result = {"step": "open", "problem": str(error)}
    print(json.dumps(result))
    return 1 if "problem" in result else 0


if __name__ == "__main__":
    sys.exit(main())
