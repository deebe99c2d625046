"""The pure parts of the release's dry run: versions that agree, the changelog's part, checksums."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from release.agreement import (
    NotReleasable,
    changelog_section,
    checksums,
    disagreements,
    image_versions,
    nightly_verdict,
)

ROOT = Path(__file__).parents[2]
MANIFEST = (
    '  - image: registry.example/surefoot/operator:0.2.0\n    image: "surefoot/runtime:0.2.0"\n  image: redis:8.2\n'
)
NAMES = ("surefoot/operator", "surefoot/runtime")


def test_each_place_with_another_version_is_named() -> None:
    assert disagreements({"wheel": "0.2.0", "chart": "0.2.0"}) == []
    assert disagreements({"wheel": "0.2.0", "chart": "0.1.0"}) == ["chart says 0.1.0, the wheel 0.2.0"]


def test_images_are_found_under_any_registry() -> None:
    assert image_versions(MANIFEST, NAMES) == {"image surefoot/operator": "0.2.0", "image surefoot/runtime": "0.2.0"}


@pytest.mark.parametrize(
    ("manifest", "told"),
    [("image: redis:8", "no image"), (MANIFEST + "  image: surefoot/runtime:0.1.0\n", "0.1.0, 0.2.0")],
)
def test_an_image_without_one_tag_is_refused(manifest: str, told: str) -> None:
    with pytest.raises(NotReleasable, match=told):
        image_versions(manifest, NAMES)


def test_the_changelog_s_part_ends_where_the_next_begins() -> None:
    text = "# Changelog\n\n## [0.2.0] - 2026-11-23\n\n### Added\n\n* a\n\n## 0.1.0\n\n* b\n"
    assert changelog_section(text, "0.2.0") == "### Added\n\n* a\n"
    assert changelog_section(text, "0.1.0") == "* b\n"


@pytest.mark.parametrize("text", ["# Changelog\n", "## Unreleased\n\n## 0.0.9\n\n* old\n"])
def test_nothing_to_say_is_nothing_to_release(text: str) -> None:
    with pytest.raises(NotReleasable):
        changelog_section(text, "0.2.0")


def test_this_project_s_changelog_has_a_part_to_release() -> None:
    assert "###" in changelog_section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), "0.1.0")


def test_sha256sum_accepts_the_checksums(tmp_path: Path) -> None:
    files = {"b.txt": b"b", "a.txt": b"a"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "SUMS").write_text(checksums(files))
    done = subprocess.run(["sha256sum", "--check", "--strict", "SUMS"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0
    (tmp_path / "a.txt").write_bytes(b"other")
    done = subprocess.run(["sha256sum", "--check", "--strict", "SUMS"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode != 0


COMMIT = "a" * 40
GREEN = {"commit": COMMIT, "stages": {"pure": {"result": "passed"}, "mutations": {"result": "passed"}}}


def test_a_green_nightly_run_of_the_commit_vouches_for_it() -> None:
    assert nightly_verdict(json.dumps(GREEN), COMMIT) == ""


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("", "no nightly run"),
        ("{", "not the record"),
        ("[]", "not the record"),
        ('{"commit": "' + COMMIT + '", "stages": [1]}', "not the record"),
        (json.dumps(GREEN | {"commit": "b" * 40}), "is of bbbbbbbbbbbb, not of aaaaaaaaaaaa"),
        (json.dumps(GREEN | {"commit": COMMIT + "+changes"}), "not of"),
        (json.dumps(GREEN | {"stages": {}}), "none ran"),
        (json.dumps(GREEN | {"stages": {"fuzz": {"result": "failed"}}}), "did not pass: fuzz"),
    ],
)
def test_any_other_record_does_not_vouch(record: str, reason: str) -> None:
    assert reason in nightly_verdict(record, COMMIT)
