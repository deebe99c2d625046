"""Opens the persistent tier that the settings name. Called by the drain, by restore and by the tools."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from surefoot.errors import ConfigurationError
from surefoot.settings import PersistentSettings
from surefoot.tiers.directory import DirectoryStore
from surefoot.tiers.persistent import PersistentTier


def open_persistent(settings: PersistentSettings, job: str) -> PersistentTier:
    """The job's persistent tier: `file:///folder` or `s3://bucket/prefix`. Nothing is asked of a bucket yet."""
    parts = urlsplit(settings.uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return PersistentTier(DirectoryStore(Path(unquote(parts.path))), job)
    if parts.scheme == "s3" and parts.netloc:
        from surefoot.tiers.s3 import S3Store  # boto3 takes half a second to import: only those pay who use it

        return PersistentTier(S3Store(settings, parts.netloc, unquote(parts.path)), job)
    raise ConfigurationError(
        f"checkpoint.persistent.uri is {settings.uri!r}: file:///folder (absolute) and s3://bucket/prefix are allowed"
    )
