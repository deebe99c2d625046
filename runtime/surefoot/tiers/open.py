"""Opens the persistent tier that the settings name.

Drain, restore and tools do so.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from surefoot.errors import ConfigurationError
from surefoot.settings import PersistentSettings
from surefoot.tiers.directory import DirectoryStore
from surefoot.tiers.object_store import ObjectStore
from surefoot.tiers.persistent import ObjectStoreTier


def open_persistent(
    settings: PersistentSettings, job: str, *, read_only: bool = False, begin: bool = False
) -> ObjectStoreTier:
    """Opens the job's persistent tier by its URI.

    `file:///folder` or `s3://bucket/prefix`. Nothing is asked of a bucket yet. `read_only`: an older job's, which
    nobody changes. `begin`: makes a folder that is not there. A process does so once, as it starts: a folder that is
    missing later is a disk that went away, whose checkpoints a new, empty one would hide.
    """
    return ObjectStoreTier(open_store(settings, begin=begin), job, read_only)


def open_store(settings: PersistentSettings, *, begin: bool = False) -> ObjectStore:
    """Opens the store of all jobs' objects that the settings name."""
    parts = urlsplit(settings.uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return DirectoryStore(Path(unquote(parts.path)), begin)
    if parts.scheme == "s3" and parts.netloc:
        from surefoot.tiers.s3 import S3Store  # botocore takes half a second to import: only those pay who use it

        return S3Store(settings, parts.netloc, unquote(parts.path))
    raise ConfigurationError(
        f"checkpoint.persistent.uri is {settings.uri!r}: file:///folder (absolute) and s3://bucket/prefix are allowed"
    )
