"""The images that are built, and how docker is asked for them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SECRETS = ("pip.conf", "ca.crt")


@dataclass(frozen=True)
class Recipe:
    """One image: its name without prefix and tag, its Dockerfile, who runs in it."""

    name: str
    dockerfile: str
    user: str


OPERATOR = Recipe("operator", "docker/operator.Dockerfile", "65532:65532")
RUNTIME = Recipe("runtime", "docker/runtime.Dockerfile", "1000:1000")
RECIPES = (OPERATOR, RUNTIME)


@dataclass(frozen=True)
class Release:
    """What names an image and what its labels say."""

    prefix: str
    version: str
    revision: str
    source: str

    def tag(self, recipe: Recipe) -> str:
        """With prefix and version, as charts and examples name it."""
        return f"{self.prefix}{recipe.name}:{self.version}"


def build_arguments(recipe: Recipe, release: Release, base: str, can_bridge: bool, extra_index: str) -> list[str]:
    """Behind `docker`: the build of one image from the repository's root.

    Args:
        recipe: which.
        release: its name and labels.
        base: what it stands on, with a digest where there is one.
        can_bridge: whether builds have a network of their own; else they use the machine's.
        extra_index: a second package index, such as PyTorch's of CPU builds; empty for none.
    """
    said = {"BASE": base, "VERSION": release.version, "REVISION": release.revision, "SOURCE": release.source}
    if extra_index and recipe is RUNTIME:
        said["PIP_EXTRA_INDEX_URL"] = extra_index
    arguments = ["build", "--file", recipe.dockerfile, "--tag", release.tag(recipe)]
    arguments += [] if can_bridge else ["--network", "host"]
    for name, value in said.items():
        arguments += ["--build-arg", f"{name}={value}"]
    return arguments


def pip_settings(listed: str) -> tuple[str, str | None]:
    """A pip.conf for a build, and the file of authorities that it needs, from what `pip config list` says.

    Indexes, trusted hosts, authorities and time limits of this machine's pip hold in the build; the rest is about this
    machine alone. What the environment says goes before what a file says, as in pip.
    """
    kept = ("index-url", "extra-index-url", "trusted-host", "cert", "timeout", "default-timeout", "retries")
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        where, _, value = line.partition("=")
        section, _, name = where.strip().rpartition(".")
        if name in kept and section in ("global", "install", ":env:"):
            found[name.removeprefix("default-")] = value.strip().strip("'\"")
    authorities = found.get("cert")
    if authorities is not None:
        found["cert"] = "/run/secrets/ca.crt"
    lines = [f"{name} = {value}" for name, value in sorted(found.items())]
    return "\n".join(["[global]", *lines, ""]), authorities
