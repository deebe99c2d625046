"""The probe of a persistent tier: on a folder and on a bucket, and nothing of it is left."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from surefoot.errors import TierUnavailable
from surefoot.settings import PersistentSettings
from surefoot.tiers.object_store import DirectoryStore
from surefoot.tiers.persistent import open_store
from surefoot.tools import check_tier
from surefoot_operator.api.spec import PersistentTierSpec
from surefoot_operator.cli.doctor import probed


def test_a_probe_writes_reads_deletes_and_leaves_nothing(place: PersistentSettings) -> None:
    store = open_store(place, create_root=True)
    store.put("job/kept", b"x")
    found = check_tier.check_tier(store, "1")
    assert {"place", "write_seconds", "read_seconds", "delete_seconds"} == set(found)
    assert (store.read("job/kept"), store.list_sizes(".probe-1")) == (b"x", {})
    store.close()


class Refusing(DirectoryStore):
    """Refuses one call, as a bucket does whose policy lacks a verb."""

    refused = ""

    def put(self, path: str, *pieces: bytes | memoryview) -> None:
        if self.refused == "write":
            raise TierUnavailable("AccessDenied")
        super().put(path, *pieces)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if self.refused == "read":
            raise TierUnavailable("AccessDenied")
        return super().read(path, offset, length) if self.refused != "bytes" else b"other"

    def remove_folder(self, folder: str) -> None:
        if self.refused == "delete":
            raise TierUnavailable("AccessDenied")
        super().remove_folder(folder)


@pytest.mark.parametrize(
    ("refused", "step", "left"),
    [("write", "write", []), ("read", "read", []), ("bytes", "read", []), ("delete", "delete", [".probe-1"])],
)
def test_what_was_refused_is_named_and_nothing_else_is_left(
    tmp_path: Path, refused: str, step: str, left: list[str]
) -> None:
    store = Refusing(tmp_path / "kept", create_root=True)
    store.refused = refused
    found = check_tier.check_tier(store, "1")
    assert found["step"] == step
    assert ("AccessDenied" in found["problem"]) == (refused != "bytes")
    assert sorted(one.name for one in (tmp_path / "kept").glob(".probe*")) == left


def test_the_tool_says_in_json_what_it_cannot_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SUREFOOT_PERSISTENT_URI", raising=False)
    assert check_tier.main() == 1
    assert json.loads(capsys.readouterr().out)["step"] == "open"


def test_the_doctor_runs_it_as_a_process(tmp_path: Path) -> None:
    found = probed(PersistentTierSpec((tmp_path / "kept").as_uri()))
    assert (found.state, found.check) == ("ok", "persistent tier")
    assert "write" in found.text
    assert not list((tmp_path / "kept").glob(".probe*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root is refused by the folder itself")
def test_a_place_that_cannot_be_written_is_a_fault_with_a_remedy() -> None:
    found = probed(PersistentTierSpec("file:///proc/nowhere"))
    assert found.state == "fault"
    assert found.remedy
