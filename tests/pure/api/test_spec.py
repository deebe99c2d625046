"""The CRD and docs/api.md say what `api.spec` declares."""

from __future__ import annotations

from pathlib import Path

import pytest

from chart import spec_pages
from surefoot_operator.api import spec


@pytest.mark.parametrize("path", spec_pages.outputs(), ids=lambda path: path.name)
def test_a_page_is_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == spec_pages.outputs()[path], "run `make manifests`"


@pytest.mark.parametrize("path", spec_pages.outputs(), ids=lambda path: path.name)
def test_a_page_that_is_stale_is_made_anew_and_the_rest_of_it_kept(path: Path) -> None:
    current = path.read_text(encoding="utf-8")
    make = spec_pages.crd if path == spec_pages.CRD else spec_pages.reference
    assert make(current.replace("How many workers the job should have", "Once upon a time")) == current
    kept = "Once upon a time" + current
    assert make(kept) == kept


def test_only_what_the_operator_does_not_read_may_have_fields_that_the_schema_lacks() -> None:
    def free(schema: object, path: str) -> list[str]:
        if not isinstance(schema, dict):
            return []
        here = [path] if schema.get("x-kubernetes-preserve-unknown-fields") else []
        return here + [found for name, inner in schema.items() for found in free(inner, f"{path}.{name}")]

    paths = free(spec_pages.mapping_schema("spec", spec.TrainingJobSpec), "spec")
    assert paths
    assert all(path.startswith("spec.properties.template.") for path in paths)
