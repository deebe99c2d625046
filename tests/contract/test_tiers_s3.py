"""How the tier sends its requests to a real S3 server: what it hashes, signs, and keeps between two openings."""

from __future__ import annotations

import pytest
from botocore.loaders import JSONFileLoader

from surefoot.settings import PersistentSettings
from surefoot.tiers import open_persistent


def test_a_tier_that_is_opened_again_does_not_parse_the_description_of_s3_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = PersistentSettings(uri="s3://bucket/", endpoint="http://127.0.0.1:1", access_key="a", secret_key="b")
    open_persistent(settings, "job-1").close()
    read: list[str] = []
    load = JSONFileLoader.load_file
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda me, path: read.append(path) or load(me, path))
    open_persistent(settings, "job-1").close()
    assert read == []
