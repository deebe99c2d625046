"""Every mistake of a job's file is named at once, each with its line."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from support.sample_jobs import REFUSED, SMALLEST
from surefoot_operator.api.loading import load_yaml
from surefoot_operator.api.mistakes import list_mistakes
from surefoot_operator.api.parse import parse_job
from surefoot_operator.errors import SpecError

JOB = """\
apiVersion: surefoot.dev/v1alpha1
kind: TrainingJob
metadata: {name: UP}
spec:
  replicas: zero
  elasticPolicy:
    minReplica: 1
    maxReplicas: -3
  checkpoint:
    memory: {intervalSteps: 0, replica: 2}
    persistent: {uri: "gs://x"}
  templat:
    spec:
      containers:
      - name: trainer
        command: [python, 5]
        env:
        - {name: A, value: 3}
        - {name: SUREFOOT_X, value: "3"}
"""


def mistakes_of(text: str) -> list[str]:
    return list_mistakes(text, load_yaml(text))


def test_all_mistakes_are_found_with_their_lines_also_below_a_misspelt_field() -> None:
    found = [sentence.split(" is not allowed")[0] for sentence in mistakes_of(JOB)]
    assert found == [
        "line 3: metadata.name: 'UP'",
        "line 5: spec.replicas: 'zero'",
        "line 7: spec.elasticPolicy: 'minReplica'",
        "line 8: spec.elasticPolicy.maxReplicas: -3",
        "line 10: spec.checkpoint.memory: 'replica'",
        "line 10: spec.checkpoint.memory.intervalSteps: 0",
        "line 11: spec.checkpoint.persistent.uri: 'gs://x'",
        "line 12: spec: 'templat'",
        "line 16: spec.template.spec.containers[0].command[1]: 5",
        "line 18: spec.template.spec.containers[0].env[0].value: (not shown)",
        "line 19: spec.template.spec.containers[0].env[1].name: 'SUREFOOT_X'",
    ]


def test_what_is_missing_is_said_once_and_what_stands_beside_it_too() -> None:
    text = JOB.split("spec:")[0].replace("UP", "up") + "spec: {replicas: 0}\n"
    assert [sentence.split(" is not allowed")[0] for sentence in mistakes_of(text)] == [
        "line 4: spec.template: None",
        "line 4: spec.replicas: 0",
    ]


def test_a_valid_job_has_none() -> None:
    text = yaml.safe_dump(SMALLEST)
    assert mistakes_of(text) == []


@given(st.lists(st.sampled_from(REFUSED), min_size=1, max_size=4))
def test_a_job_has_mistakes_if_and_only_if_the_parser_refuses_it(changes: list[tuple[str, object, str, str]]) -> None:
    body = yaml.safe_load(yaml.safe_dump(SMALLEST))
    for path, value, *_ in changes:
        with contextlib.suppress(TypeError, IndexError, KeyError, AttributeError):  # an earlier one removed its place
            target: Any = body
            *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
            for step in steps:
                target = target[step]
            if value is ...:
                del target[last]
            else:
                target[last] = copy.deepcopy(value)  # a later change may write into it, and REFUSED is everybody's
    try:
        text = yaml.safe_dump(body)
    except yaml.YAMLError:
        return  # no file has that value
    mistakes = mistakes_of(text)
    assert len(set(mistakes)) == len(mistakes)
    with contextlib.suppress(SpecError) if mistakes else contextlib.nullcontext():
        parse_job(load_yaml(text))
        assert mistakes == []
