"""What is made from the spec's declarations, from the chart and for it: the CRD and its copy, tables, manifests for kubectl.

`outputs` is what should be there; `python -m chart` (as `make manifests`) writes it, and a test holds the files equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from chart import documented, spec_pages
from chart.helm import CHART, NAMESPACE, PROJECT, Object, is_hook, objects
from surefoot.memory_server.server_process import COMMON_CONFIGURATION

_HELM_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by")
_INSTALL_HEAD = """# Surefoot for kubectl: the chart with its defaults, in a namespace of its own. Made by `make manifests`; edit the chart instead.
#
#   kubectl apply --server-side -f manifests/crd.yaml -f manifests/install.yaml
"""
_VALUES_HEAD = """# Values of the chart

Made from the comments in [values.yaml](values.yaml) by `make manifests`. `values.schema.json` checks them: a value that is not
in this table, or of another kind, is refused with its path.

"""


def copies() -> dict[Path, str]:
    """Returns the pages of the spec, and the copies in the chart, as helm reads nothing outside of it."""
    pages = spec_pages.outputs()
    return {
        **pages,
        CHART / "files" / "crd.yaml": pages[spec_pages.CRD],
        CHART / "files" / "server.conf": COMMON_CONFIGURATION,
    }


def outputs() -> dict[Path, str]:
    """Each generated file and what it should say."""
    return {
        **copies(),
        CHART / "values.md": _VALUES_HEAD + documented.table((CHART / "values.yaml").read_text(encoding="utf-8")),
        PROJECT / "manifests" / "install.yaml": install(),
    }


def install() -> str:
    """Everything but the CRD and helm's own, with the namespace first."""
    labels = {"app.kubernetes.io/name": "surefoot", "pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    rendered = [_stripped(found) for found in objects({"crds": {"enabled": False}}) if not is_hook(found)]
    documents = [yaml.dump(found, Dumper=_Dumper, sort_keys=False, width=120) for found in (namespace, *rendered)]
    return _INSTALL_HEAD + "".join(f"---\n{document}" for document in documents)


def _stripped(found: Object) -> Object:
    """Without helm's labels in its own metadata."""
    labels = found["metadata"].get("labels", {})
    kept = {name: value for name, value in labels.items() if name not in _HELM_LABELS}
    return {**found, "metadata": {**found["metadata"], "labels": kept}}


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stay readable."""


def _text(dumper: yaml.SafeDumper, value: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def write() -> list[Path]:
    """Writes what differs; returns those files."""
    changed = []
    for made in (copies, outputs):  # the manifests are rendered with the copies as they are then
        for path, content in made().items():
            if not path.exists() or path.read_text(encoding="utf-8") != content:
                path.write_text(content, encoding="utf-8")
                changed.append(path)
    return changed
