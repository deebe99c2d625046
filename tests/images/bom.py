"""The bill of materials of an image in CycloneDX's JSON: Debian's packages and Python's. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from images.contents import DEBIAN_PACKAGES, PYTHON_PACKAGE


@dataclass(frozen=True)
class Package:
    """One that is installed."""

    kind: str
    name: str
    version: str
    license: str = ""

    @property
    def url(self) -> PackageURL:
        return PackageURL(self.kind, "debian" if self.kind == "deb" else None, self.name, self.version)


def packages(texts: Mapping[str, str]) -> list[Package]:
    """What dpkg and Python say is installed, by kind and name."""
    found = [*_debian(texts.get(DEBIAN_PACKAGES, "")), *_python(texts)]
    return sorted(set(found), key=lambda one: (one.kind, one.name, one.version))


def document(image: str, version: str, found: list[Package]) -> str:
    """The bill as text; the same packages give the same components."""
    bom = Bom(components=[_component(one) for one in found])
    container = Component(name=image, version=version, type=ComponentType.CONTAINER, bom_ref=image)
    bom.metadata.component = container
    bom.register_dependency(container, bom.components)
    return JsonV1Dot6(bom).output_as_string(indent=1)


def _component(one: Package) -> Component:
    licenses = [DisjunctiveLicense(name=one.license)] if one.license else []
    return Component(name=one.name, version=one.version, purl=one.url, bom_ref=str(one.url), licenses=licenses)


def _debian(status: str) -> Iterator[Package]:
    for paragraph in status.split("\n\n"):
        said = HeaderParser().parsestr(paragraph.lstrip("\n"))
        if "installed" in said.get("Status", "").split():
            yield Package("deb", said["Package"], said["Version"])


def _python(texts: Mapping[str, str]) -> Iterator[Package]:
    for path, text in texts.items():
        if PYTHON_PACKAGE.search(path):
            said = HeaderParser().parsestr(text)
            name = said["Name"].lower().replace("_", "-").replace(".", "-")
            named = said.get("License-Expression") or said.get("License") or ""
            yield Package("pypi", name, said["Version"], named if len(named) < 80 and "\n" not in named else "")
