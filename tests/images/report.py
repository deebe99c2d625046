"""What build/images.json says of an image, and which of it is a finding. Pure."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from images.contents import Contents
from images.recipes import Recipe

LABELS = ("title", "version", "revision", "source", "licenses")
TELLING = re.compile(r"(PASSWORD|PASSWD|TOKEN|SECRET|CREDENTIAL)", re.IGNORECASE)
MIB = 1 << 20


@dataclass(frozen=True)
class Findings:
    """What an image should not have; sentences and paths, empty where all is well."""

    setuid: list[str]
    world_writable: list[str]
    compilers: list[str]
    secrets: list[str]
    other: list[str]

    def sentences(self) -> list[str]:
        """One each."""
        return [
            *(f"{path} runs as another user than who starts it" for path in self.setuid),
            *(f"everybody may change {path}" for path in self.world_writable),
            *(f"{path} is a compiler" for path in self.compilers),
            *(f"a secret? {what}" for what in self.secrets),
            *self.other,
        ]


def findings(recipe: Recipe, inspected: dict[str, Any], contents: Contents) -> Findings:
    """Of its configuration and of its files."""
    settings = inspected["Config"]
    other = []
    if settings["User"] != recipe.user:
        other.append(f"its user is {settings['User'] or 'root'}, not {recipe.user}")
    labels = settings.get("Labels") or {}
    other += [f"the label {name} is missing" for name in LABELS if not labels.get(f"org.opencontainers.image.{name}")]
    told = [entry.partition("=")[0] for entry in settings.get("Env") or []]
    secrets = [f"environment {name}" for name in told if TELLING.search(name)]
    return Findings(
        contents.setuid(), contents.world_writable(), contents.compilers(), [*secrets, *contents.secrets], other
    )


def row(inspected: dict[str, Any], history: list[dict[str, Any]], found: Findings) -> dict[str, Any]:
    """One image of images.json."""
    settings = inspected["Config"]
    return {
        "id": inspected["Id"],
        "digests": inspected.get("RepoDigests") or [],
        "bytes": inspected["Size"],
        "layers": [{"bytes": entry["Size"], "by": entry["CreatedBy"]} for entry in reversed(history) if entry["Size"]],
        "user": settings["User"],
        "entrypoint": settings.get("Entrypoint"),
        "command": settings.get("Cmd"),
        "labels": settings.get("Labels") or {},
        "findings": asdict(found),
    }


def line(name: str, image: dict[str, Any]) -> str:
    """For people."""
    wrong = sum(len(entries) for entries in image["findings"].values())
    return (
        f"{name}: {image['bytes'] / MIB:,.0f} MiB in {len(image['layers'])} layers, user {image['user']}, "
        f"{image['packages']} packages, built in {image['build_seconds']:.0f} s, findings {wrong}"
    )
