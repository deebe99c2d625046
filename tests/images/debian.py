"""What Debian's packages bring, without installing anything: a docker daemon, and a root folder with Python.

Packages are unpacked into a folder of the user's cache: no service starts, and no other program of the machine changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from images.docker import Docker
from images.errors import ImagesError

NETFILTER = (
    "iptables",
    "libip4tc2",
    "libip6tc2",
    "libxtables12",
    "libmnl0",
    "libnftnl11",
    "libnfnetlink0",
    "libnetfilter-conntrack3",
)
"""docker answers names for its containers by rules in their own networks, and asks iptables for them: kind's nodes find one another so."""
PACKAGES = ("docker.io", "containerd", "runc", "debootstrap", "libdevmapper1.02.1", *NETFILTER)
ALTERNATIVES = {"usr/sbin/iptables": "xtables-nft-multi", "usr/sbin/ip6tables": "xtables-nft-multi"}
"""What installing the packages would have linked."""
RELEASE = "bookworm"
INCLUDED = "python3,python3-venv,ca-certificates"
LEFT_OUT = ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man", "usr/share/locale")
"""What nobody reads in a container; `copyright` files are kept."""
HOSTS_OWN = ("etc/hostname", "etc/resolv.conf", "etc/hosts")
"""debootstrap copies them from the machine it runs on."""


def unpack_packages(folder: Path) -> Path:
    """The folder as the root of what the packages hold; unpacked once.

    Raises:
        ImagesError: apt has them not, in its own words.
    """
    ready = folder / ".unpacked"
    if ready.exists() and ready.read_text().split() == list(PACKAGES):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        download = ("apt-get", "--quiet", "download", *PACKAGES)
        if _tried(*download, folder=downloads).returncode != 0:  # lists may be missing or old
            _tried("apt-get", "--quiet", "update")
            _done(*download, folder=downloads)
        for package in sorted(Path(downloads).glob("*.deb")):
            _done("dpkg-deb", "--extract", str(package), str(folder))
    for link, program in ALTERNATIVES.items():
        Path(folder, link).symlink_to(program)
    ready.write_text("\n".join(PACKAGES))
    return folder


def environment(root: Path) -> dict[str, str]:
    """For programs out of the unpacked packages."""
    programs = ":".join(str(root / name) for name in ("usr/bin", "usr/sbin", "sbin"))
    folders = sorted(root.glob("*/lib/*-linux-gnu*")) + sorted(root.glob("lib/*-linux-gnu*"))
    rules = next((str(folder / "xtables") for folder in folders if (folder / "xtables").is_dir()), "")
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}:/usr/sbin:/sbin",
        "LD_LIBRARY_PATH": ":".join(map(str, folders)),
        "XTABLES_LIBDIR": rules,
    }


def make_base(docker: Docker, root: Path, image: str) -> None:
    """Debian with its Python and nothing that compiles, as an image of that name; minutes.

    Raises:
        ImagesError: debootstrap's or docker's own words.
    """
    with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
        made = Path(scratch, "base")
        _done(
            str(root / "usr/sbin/debootstrap"),
            "--variant=minbase",
            f"--include={INCLUDED}",
            RELEASE,
            str(made),
            environment={**os.environ, "DEBOOTSTRAP_DIR": str(root / "usr/share/debootstrap")},
        )
        _slim(made)
        archive = Path(scratch, "base.tar")
        _done("tar", "--numeric-owner", "--sort=name", "-C", str(made), "-cf", str(archive), ".")
        docker.run("image", "import", "--message", f"debootstrap {RELEASE}", str(archive), image, seconds=300)


def _slim(made: Path) -> None:
    for name in HOSTS_OWN:
        (made / name).unlink(missing_ok=True)
    for name in LEFT_OUT:
        for path in sorted((made / name).rglob("*"), reverse=True):
            if path.is_symlink() or not path.is_dir():
                if path.name != "copyright":
                    path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()


def _tried(
    *command: str, folder: str | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def _done(*command: str, folder: str | None = None, environment: dict[str, str] | None = None) -> None:
    said = _tried(*command, folder=folder, environment=environment)
    if said.returncode != 0:
        words = (said.stderr.strip() or said.stdout.strip())[-800:]
        raise ImagesError(f"`{' '.join(command)}` failed with {said.returncode}: {words}")
