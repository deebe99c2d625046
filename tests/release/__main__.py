"""`make release-dry-run`: builds what a release consists of into build/release, tries it, and publishes nothing.

Wheel and source archive, the wheel installed into a fresh environment of each Python that is there (of the others: whether all it
needs has wheels), the chart as a package,
the rendered manifest, bills of materials, the changelog's part, checksums. Images are `make images`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import yaml

from chart import helm
from images.bom import Package, document
from release.agreement import (
    NotReleasable,
    changelog_section,
    checksums,
    disagreements,
    image_versions,
    nightly_verdict,
)

PROJECT = helm.PROJECT
BUILT = PROJECT / "build" / "release"
NIGHTLY = PROJECT / "build" / "nightly.json"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXAMPLES = PROJECT / "examples" / "cluster"
PROGRAMS = ("surefoot", "surefoot-operator", "kubectl-surefoot")
CALL_SECONDS = 600


def run(*words: str | Path, **environment: str) -> str:
    """The output of a program that succeeds."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=PROJECT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=CALL_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise NotReleasable(f"{' '.join(str(w) for w in words)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def uv() -> Path:
    """The one that `make setup` installed."""
    return Path(sys.executable).with_name("uv")


def interpreter(version: str) -> str | None:
    """A Python of this version that is on the machine, on PATH or pyenv's; nothing is downloaded."""
    found = subprocess.run(
        [str(uv()), "python", "find", "--no-python-downloads", "--system", version],
        capture_output=True,
        text=True,
        timeout=CALL_SECONDS,
        check=False,
    )
    if found.returncode == 0:
        return found.stdout.strip()
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    return next((str(path) for path in sorted(versions.glob(f"{version}.*/bin/python"))), None)


def resolved(built: Path, version: str) -> int:
    """How many distributions an installation would have on a Python that is not there: each as a wheel for it.

    Raises:
        NotReleasable: one of them has no wheel.
    """
    folder = BUILT / f"python{version}"
    asked = ("--target", folder, "--python-version", version, "--only-binary", ":all:")
    run(uv(), "pip", "install", "--quiet", "--python", sys.executable, *asked, f"{built}[cli,operator]")
    found = len(list(folder.glob("*.dist-info")))
    shutil.rmtree(folder)
    return found


def wheel() -> Path:
    """Builds archive and wheel; the wheel is made of the archive, as an index's users would."""
    run(uv(), "build", "--quiet", "--out-dir", BUILT)
    (BUILT / ".gitignore").unlink(missing_ok=True)
    [built] = BUILT.glob("*.whl")
    return built


def tried(built: Path, version: str, python: str) -> tuple[str, list[Package]]:
    """Installs the wheel into an empty environment and runs its programs.

    Returns:
        The version that `surefoot --version` says, and what was installed.
    """
    folder = BUILT / f"python{version}"
    run(uv(), "venv", "--quiet", "--python", python, folder)
    inside = folder / "bin"
    run(uv(), "pip", "install", "--quiet", "--python", inside / "python", f"{built}[cli,operator]")
    said = run(inside / "surefoot", "--version").split()[-1]
    for program in PROGRAMS:
        run(inside / program, "--help")
    run(inside / "surefoot", "validate", "-f", PROJECT / "examples" / "gpt.yaml")
    files = list(folder.rglob("*.dist-info/METADATA"))
    about = [HeaderParser().parsestr(p.read_text(encoding="utf-8")) for p in files]
    shutil.rmtree(folder)
    return said, [Package("pypi", re.sub(r"[-_.]+", "-", m["Name"].lower()), m["Version"]) for m in about]


def chart() -> tuple[Path, dict[str, str]]:
    """The chart's package, and the versions that it says."""
    helm.helm("package", str(helm.CHART), "--destination", str(BUILT))
    [package] = BUILT.glob("surefoot-*.tgz")
    said = yaml.safe_load((helm.CHART / "Chart.yaml").read_text(encoding="utf-8"))
    return package, {"chart": said["version"], "chart's appVersion": str(said["appVersion"])}


def wheel_version(built: Path) -> str:
    """What its metadata says."""
    with zipfile.ZipFile(built) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return str(HeaderParser().parsestr(archive.read(name).decode())["Version"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="only these, like 3.12; default: all that are there")
    parser.add_argument(
        "--without-nightly", action="store_true", help="without a green nightly run of this commit; recorded"
    )
    options = parser.parse_args()
    commit = run("git", "rev-parse", "HEAD").strip()
    nightly = nightly_verdict(NIGHTLY.read_text(encoding="utf-8") if NIGHTLY.is_file() else "", commit)
    if nightly and not options.without_nightly:
        raise SystemExit(f"not releasable: {nightly}; run `make test-nightly`, or give ARGUMENTS=--without-nightly")
    shutil.rmtree(BUILT, ignore_errors=True)
    BUILT.mkdir(parents=True)
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    built = wheel()
    versions = {"wheel": wheel_version(built), "pyproject.toml": project["version"]}
    print(f"{built.name}: {built.stat().st_size / 1e3:.0f} kB")
    for version in options.python or PYTHONS:
        python = interpreter(version)
        if python is None:
            print(f"Python {version}: not on this machine; all {resolved(built, version)} have a wheel for it")
            continue
        said, packages = tried(built, version, python)
        versions[f"surefoot --version on Python {version}"] = said
        (BUILT / f"sbom-python{version}.cdx.json").write_text(document("surefoot", said, packages), encoding="utf-8")
        print(
            f"Python {version}: installed with {len(packages) - 1} others; {', '.join(PROGRAMS)} and a job's check run"
        )
    package, of_chart = chart()
    manifest = helm.text()
    (BUILT / "install.yaml").write_text(manifest, encoding="utf-8")
    examples = "".join(path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.glob("*.yaml")))
    versions |= of_chart | image_versions(manifest, ("surefoot/operator",))
    versions |= image_versions(examples, ("surefoot/runtime",))
    (BUILT / "CHANGES.md").write_text(
        changelog_section((PROJECT / "CHANGELOG.md").read_text(encoding="utf-8"), versions["wheel"]), encoding="utf-8"
    )
    (BUILT / "nightly.txt").write_text(f"{commit}: {nightly or 'the nightly run passed'}\n", encoding="utf-8")
    files = {p.name: p.read_bytes() for p in sorted(BUILT.iterdir()) if p.is_file()}
    (BUILT / "SHA256SUMS").write_text(checksums(files), encoding="utf-8")
    if wrong := disagreements(versions):
        raise NotReleasable("; ".join(wrong))
    print(
        f"{package.name}, install.yaml, {len(files)} files with checksums; {len(versions)} places say {project['version']}"
    )


if __name__ == "__main__":
    try:
        main()
    except NotReleasable as error:
        sys.exit(f"not to be released: {error}")
