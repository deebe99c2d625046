"""Tests of `convert.conversion`."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from support.foreign_jobs import ALL, hyperpod_job, job_set, one, pod, pytorch_job, runtime, train_job
from surefoot_operator.api.parse import parse_job
from surefoot_operator.cli.main import main
from surefoot_operator.convert.conversion import KINDS, convert_command, convert_documents
from surefoot_operator.convert.job_draft import ADAPT_PROGRAM, render_yaml
from surefoot_operator.convert.manifest import NotConvertible

# ---- conversion ------------------------------------------------------------------------------------------------------
# Other systems' jobs as TrainingJobs: what is taken over, refused, or to be done.


def test_a_pytorch_job_keeps_its_sizes_limits_and_program() -> None:
    found, job = one(pytorch_job())
    spec = job.spec
    assert (job.name, job.namespace, spec.replicas, spec.nproc_per_node, spec.suspend) == ("mine", "team", 4, 4, False)
    assert spec.elastic_policy is not None
    assert (spec.elastic_policy.min_replicas, spec.elastic_policy.max_replicas) == (2, 8)
    policy = spec.run_policy
    assert (policy.backoff_limit, policy.ttl_seconds_after_finished, policy.active_deadline_seconds) == (3, 60, 3600)
    assert policy.scheduling_deadline_seconds == 30
    assert spec.failure_policy.max_restarts == 5
    final = {code for rule in spec.failure_policy.rules for code in rule.on_exit_codes.values}
    assert final == set(range(1, 128))
    assert (spec.template.command, spec.template.args) == (("python", "train.py"), ("--lr", "1e-4"))
    assert spec.template.env == (("A", "b"),)
    pod = spec.template.raw["spec"]
    assert [container["name"] for container in pod["containers"]] == ["trainer", "sidecar"]
    assert pod["priorityClassName"] == "high"
    assert "restartPolicy" not in pod
    left = {note.path for note in found.skipped_fields}
    assert {"spec.elasticPolicy.rdzvBackend", "spec.elasticPolicy.metrics", "spec.runPolicy.cleanPodPolicy"} <= left
    assert found.to_do == (ADAPT_PROGRAM,)


def test_masters_and_workers_that_differ_are_said() -> None:
    job = pytorch_job()
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"] = {"spec": {"containers": [{"name": "pytorch"}]}}
    assert "which differs from the Worker's" in one(job)[0].to_do[0]


def test_a_job_that_never_restarts_does_not_here() -> None:
    job = pytorch_job()
    job["spec"]["pytorchReplicaSpecs"] = {"Worker": {"restartPolicy": "Never", "template": pod()}}
    assert one(job)[1].spec.failure_policy.max_restarts == 0


def test_a_hyperpod_job_keeps_its_sizes_and_times() -> None:
    _, job = one(hyperpod_job())
    spec, elastic = job.spec, job.spec.elastic_policy
    assert elastic is not None
    assert (spec.replicas, spec.nproc_per_node) == (4, 4), "the launcher's `auto` is the number of GPUs"
    assert (elastic.min_replicas, elastic.max_replicas, elastic.replica_increment_step) == (2, 6, 2)
    assert (elastic.faulty_scale_down_timeout_seconds, elastic.scale_up_snooze_seconds) == (30, 60)
    assert (spec.run_policy.backoff_limit, spec.run_policy.startup_deadline_seconds) == (10, 240)
    assert spec.health_policy.step_timeout_seconds == 90
    assert (spec.failure_policy.max_restarts, spec.failure_policy.eval_period_seconds) == (2, 600)
    assert spec.spares == 1


def test_a_job_set_is_its_group_that_trains() -> None:
    found, job = one(job_set())
    assert (job.spec.replicas, job.spec.failure_policy.max_restarts) == (6, 4)
    assert "spec.template is that of workers, one of 2 groups" in found.to_do[0]
    assert "spec.replicatedJobs[0]" in {note.path for note in found.skipped_fields}


def test_a_train_job_lies_over_its_runtime() -> None:
    found, job = one(runtime(), train_job())
    container = job.spec.template.raw["spec"]["containers"][0]
    assert (container["image"], job.spec.replicas, job.spec.nproc_per_node, job.spec.suspend) == ("torch:2", 3, 2, True)
    assert dict(job.spec.template.env) == {"A": "c", "B": "b"}
    assert found.to_do == (ADAPT_PROGRAM,)
    alone, _ = one(train_job())
    assert "the runtime torch is not in the file" in alone.to_do[0]


def test_a_command_line_is_a_job() -> None:
    found = convert_command(
        ["torchrun", "--nnodes=2:4", "--nproc-per-node=8", "--max-restarts=3", "src/pre_train.py", "--lr", "1"]
    )
    spec = parse_job(found.job).spec
    assert spec.elastic_policy is not None
    assert (found.job["metadata"]["name"], spec.replicas, spec.nproc_per_node) == ("pre-train", 4, 8)
    assert (spec.elastic_policy.min_replicas, spec.failure_policy.max_restarts) == (2, 3)
    with pytest.raises(NotConvertible, match="does not begin with torchrun"):
        convert_command(["python", "train.py"])


def test_placeholders_are_named_and_their_place_is_to_be_filled() -> None:
    job = hyperpod_job()
    job["spec"]["replicaSpecs"][0]["replicas"] = "$NODES"
    job["spec"]["replicaSpecs"][0]["template"] = {"spec": {"containers": [{"name": "p", "image": "${IMAGE}"}]}}
    found, _ = one(job)
    told = "\n".join(found.to_do)
    assert "spec.replicas: write the number of workers in place of $NODES" in told
    assert "placeholders remain: ${IMAGE}" in told
    assert "replace CHANGE-ME by the command of one rank" in told


def test_a_launcher_within_another_program_is_said() -> None:
    job = hyperpod_job()
    container = {"name": "p", "command": ["profile", "torchrun", "train.py"]}
    job["spec"]["replicaSpecs"][0]["template"] = {"spec": {"containers": [container]}}
    assert any("another program starts `torchrun`" in text for text in one(job)[0].to_do)


def test_texts_that_other_readers_take_for_numbers_are_quoted() -> None:
    found = convert_command(["torchrun", "a.py", "1e-4", "0o7", "y", "0x1F", ".5"])
    for text in ("1e-4", "0o7", "y", "0x1F", ".5"):
        assert f"- '{text}'\n" in render_yaml(found)


def test_a_file_without_a_job_is_refused_by_what_it_has() -> None:
    with pytest.raises(NotConvertible, match="it has Service etcd"):
        convert_documents([{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "etcd"}}])
    with pytest.raises(NotConvertible, match="Master or a Worker"):
        convert_documents([{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"}])


PATHS = st.sampled_from([(), ("runPolicy",), ("elasticPolicy",), ("failurePolicy",), ("network",), ("trainer",)])


@given(st.sampled_from(ALL), PATHS)
def test_a_field_that_nobody_knows_is_reported_without_its_value(make: Any, path: tuple[str, ...]) -> None:
    job = make()
    at = job["spec"]
    for key in path:
        at = at.setdefault(key, {})
    at["novelty"] = {"inside": "s3cr3t-value"}
    (found,), _ = convert_documents([job])
    dotted = ".".join(("spec", *path))
    assert any(note.path.startswith(dotted) for note in found.skipped_fields)
    assert "s3cr3t-value" not in render_yaml(found)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "x", "$N", "torchrun"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["spec", "name", "env"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.sampled_from(ALL), st.data())
def test_whatever_stands_in_a_field_is_converted_or_refused(make: Any, data: st.DataObject) -> None:
    job = make()
    at: Any = job
    for _ in range(data.draw(st.integers(1, 6))):
        keys = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
        if not keys:
            break
        parent, key = at, data.draw(st.sampled_from(keys))
        at = at[key]
    parent[key] = data.draw(VALUES)
    try:
        found, _ = convert_documents([job])
    except NotConvertible as refused:
        assert str(refused)  # noqa: PT017  # either is right
    else:
        assert all(render_yaml(conversion) for conversion in found)


def test_every_kind_is_tried_here() -> None:
    assert {(make()["apiVersion"].split("/")[0], make()["kind"]) for make in ALL} == set(KINDS)


# ---- convert command -------------------------------------------------------------------------------------------------
# `surefoot convert` as it is typed.

PAGE = Path(__file__).parents[3] / "docs" / "convert.md"
PYTORCHJOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: theirs}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template: {spec: {containers: [{name: pytorch, image: x, command: [torchrun, train.py]}]}}
"""
JOB = """
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata: {name: mine}
spec:
  replicaSpecs:
    - replicas: $NUM_NODES
      template:
        spec:
          containers:
            - {name: pytorch, command: [hyperpodrun, '--nproc_per_node=${GPU_PER_NODE}', train.py]}
---
apiVersion: v1
kind: Service
metadata: {name: etcd}
"""


def test_a_files_placeholders_are_filled_and_other_objects_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    assert main(["convert", "-f", str(file), "--set", "NUM_NODES=4", "--set", "GPU_PER_NODE=8"]) == 0
    said = capsys.readouterr()
    spec = parse_job(yaml.safe_load(said.out)).spec
    assert (spec.replicas, spec.nproc_per_node, spec.template.command) == (4, 8, ("python", "train.py"))
    assert "not converted: Service etcd" in said.err


def test_the_page_s_commands_end_with_a_valid_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pytorchjob.yaml").write_text(PYTORCHJOB)
    Path("hyperpod.yaml").write_text(JOB)
    [block] = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    commands = block.splitlines()
    assert len(commands) == 4
    for command in commands:
        words, _, to = command.partition(" > ")
        assert main(shlex.split(words)[1:]) == 0, capsys.readouterr()
        said = capsys.readouterr().out
        if to:
            Path(to).write_text(said)


def test_standard_input_is_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(JOB.encode())))
    assert main(["convert", "-f", "-"]) == 0
    assert "spec.replicas: write the number of workers in place of $NUM_NODES" in capsys.readouterr().out


def test_a_command_line_is_what_stands_behind_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--", "torchrun", "--nnodes", "2:4", "train.py", "--lr", "1"]) == 0
    spec = parse_job(yaml.safe_load(capsys.readouterr().out)).spec
    assert (spec.replicas, spec.template.args) == (4, ("--lr", "1"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [", "this is not YAML"),
        ("kind: Pod\napiVersion: v1", "the file has none of PyTorchJob, TrainJob, HyperPodPyTorchJob, JobSet"),
        ("", "it has no objects"),
    ],
)
def test_what_is_no_job_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    assert main(["convert", "-f", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_a_setting_without_a_value_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    assert main(["convert", "-f", str(file), "--set", "NUM_NODES"]) == 2
    assert "NAME=VALUE is needed" in capsys.readouterr().err
