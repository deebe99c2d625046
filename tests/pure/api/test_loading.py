"""Whatever is written into a TrainingJob, the parser understands or refuses it, in few words and little time."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzzing.documents import changed_documents, changed_texts, schema_documents, valid_documents
from fuzzing.judging import judge
from surefoot_operator.api.loading import load_yaml
from surefoot_operator.errors import SpecError

FEW = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def test_the_documents_that_are_changed_are_sound() -> None:
    assert all(judge(document) is not None for document in valid_documents())


@FEW
@given(changed_documents())
def test_a_document_changed_anywhere_is_understood_or_refused(document: Any) -> None:
    judge(document)


@FEW
@given(schema_documents())
def test_a_document_near_the_edges_of_the_schema_is_understood_or_refused(document: Any) -> None:
    judge(document)


@FEW
@given(changed_texts() | st.binary())
def test_any_text_is_understood_or_refused(content: str | bytes) -> None:
    judge(content)


def bomb(step: str, levels: int = 12) -> str:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} " + step.format(prior=n - 1) for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.gate_only
@pytest.mark.parametrize(
    "content",
    [
        bomb("[" + ", ".join(["*a{prior}"] * 9) + "]"),
        bomb("{{" + ", ".join(f"k{i}: *a{{prior}}" for i in range(9)) + "}}"),
        bomb("{{<<: [" + ", ".join(["*a{prior}"] * 9) + "]}}"),
        "a: " + "[" * 500 + "]" * 500,
        "a: [" + "1," * 50_100 + "]",
        "a: " + "x" * (1 << 21),
    ],
    ids=["lists", "mappings", "merges", "deep", "wide", "long"],
)
def test_what_expands_without_bound_is_refused_in_no_time(content: str) -> None:
    before = time.process_time()
    with pytest.raises(SpecError) as caught:
        load_yaml(content)
    assert "are allowed" in str(caught.value)
    assert time.process_time() - before < 20.0  # before: hours


@pytest.mark.parametrize("tag", ["int", "float", "bool", "timestamp", "binary", "null"])
@pytest.mark.parametrize("value", ["''", "x", "'é'"])
def test_a_tag_that_its_value_does_not_keep_is_no_traceback(tag: str, value: str) -> None:
    content = f"apiVersion: !!{tag} {value}\nkind: TrainingJob"
    assert judge(content) is None
