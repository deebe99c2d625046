"""Whether everything that a release is made of names one version, and the changelog's part of it. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

_IMAGE = re.compile(r"^\s+(?:- )?image: \"?(?P<name>\S+?):(?P<tag>[^\s\"]+)\"?$", re.MULTILINE)
_HEADING = re.compile(r"^## (?P<title>.+)$", re.MULTILINE)


class NotReleasable(Exception):
    """What a release would get wrong, as sentences."""


def disagreements(versions: Mapping[str, str]) -> list[str]:
    """One sentence for each place that names another version than the wheel does."""
    wanted = versions["wheel"]
    return [f"{place} says {found}, the wheel {wanted}" for place, found in versions.items() if found != wanted]


def nightly_verdict(record_text: str, commit: str) -> str:
    """Returns why the nightly run's record does not vouch for this commit; empty where it does.

    Args:
        record_text: build/nightly.json; empty where there is none.
        commit: what is about to be released.
    """
    if not record_text:
        return "no nightly run of this commit is recorded"
    try:
        record = json.loads(record_text)
        recorded_commit, stages = record["commit"], record["stages"]
        not_passed = sorted(name for name, stage in stages.items() if stage["result"] != "passed")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"build/nightly.json is not the record of a nightly run ({error!r})"
    if recorded_commit != commit:
        return f"the recorded nightly run is of {recorded_commit[:12]}, not of {commit[:12]}"
    if not stages or not_passed:
        return f"stages of the nightly run did not pass: {', '.join(not_passed) or 'none ran'}"
    return ""


def image_versions(manifest: str, names: tuple[str, ...]) -> dict[str, str]:
    """Tag by image of the rendered manifest, of those that this project builds.

    Raises:
        NotReleasable: an image has two tags, or none of its name is there.
    """
    found: dict[str, set[str]] = {name: set() for name in names}
    for match in _IMAGE.finditer(manifest):
        for name in names:
            if match["name"] == name or match["name"].endswith(f"/{name}"):
                found[name].add(match["tag"])
    wrong = {name: tags for name, tags in found.items() if len(tags) != 1}
    if wrong:
        raise NotReleasable("; ".join(f"{n}: {', '.join(sorted(tags)) or 'no image'}" for n, tags in wrong.items()))
    return {f"image {name}": tags.pop() for name, tags in found.items()}


def changelog_section(text: str, version: str) -> str:
    """The part of this version, or of what is unreleased: that is what would be released.

    Raises:
        NotReleasable: there is neither, or nothing stands in it.
    """
    headings = list(_HEADING.finditer(text))
    for number, heading in enumerate(headings):
        if heading["title"].strip("[] ").split("]")[0].split(" ")[0] in (version, "Unreleased"):
            end = headings[number + 1].start() if number + 1 < len(headings) else len(text)
            section = text[heading.end() : end].strip()
            if not section:
                raise NotReleasable(f"CHANGELOG.md says nothing under {heading['title']}")
            return section + "\n"
    raise NotReleasable(f"CHANGELOG.md has no section of {version}, and none of what is unreleased")


def checksums(files: Mapping[str, bytes]) -> str:
    """As sha256sum writes and checks them, by name."""
    return "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
