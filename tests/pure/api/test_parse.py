"""A TrainingJob that parses is sound; one that does not names the path, the value and what is allowed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from chart import spec_pages
from support.sample_jobs import REFUSED, SMALLEST, TRAINER, changed
from surefoot.protocol.identities import SourceJob
from surefoot_operator.api.loading import load_yaml
from surefoot_operator.api.parse import POD_RULES, parse_job
from surefoot_operator.api.spec import HealthPolicy, MemoryTierSpec, RestoreFrom, checkpoints_in_memory
from surefoot_operator.errors import SpecError
from surefoot_operator.policy.membership.restore_point import source_job


@pytest.mark.parametrize(("path", "value", "where", "allowed"), REFUSED, ids=range(len(REFUSED)))
def test_a_refused_job_names_the_path_the_value_and_what_is_allowed(
    path: str, value: object, where: str, allowed: str
) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(changed(path, value))
    assert caught.value.path.startswith(where)
    assert allowed in caught.value.allowed
    if path == caught.value.path and value is not ... and not isinstance(value, list | dict) and "@" not in str(value):
        assert repr(value) in str(caught.value)


def test_each_rule_has_a_job_that_it_refuses() -> None:
    """What the reader refuses by a rule, a real API server refuses by the rule's CEL: it is given the same jobs."""
    messages = []
    for path, value, *_ in REFUSED:
        with pytest.raises(SpecError) as caught:
            parse_job(changed(path, value))
        messages.append(caught.value.allowed)
    rules = [*POD_RULES, *(rule for _, cls in spec_pages.classes() for rule in getattr(cls, "RULES", ()))]
    wanted = {rule.message for rule in rules if rule.cel}
    assert wanted
    assert [rule for rule in wanted if not any(message.startswith(rule) for message in messages)] == []


def test_fields_that_exclude_each_other_are_shown_with_their_values() -> None:
    with pytest.raises(SpecError, match="memory: intervalSteps 5 and intervalSeconds 30 is not allowed; one of"):
        parse_job(changed("spec.checkpoint.memory", {"intervalSteps": 5, "intervalSeconds": 30}))


NONSENSE: list[tuple[str, object, str, str]] = [
    ("apiVersion", "surefoot.dev/v2", "apiVersion", "surefoot.dev/v1alpha1"),
    ("kind", "TrainJob", "kind", "TrainingJob"),
    ("metadata.generation", "x", "metadata.generation", "whole number"),
    ("spec.replicas", 3.0, "spec.replicas", "whole number"),
    (f"{TRAINER}.args", [1], "spec.template.spec.containers[0].args[0]", "text"),
    ("spec.healthPolicy.stepTimeoutSeconds", float("inf"), "spec.healthPolicy.stepTimeoutSeconds", "a finite number"),
    ("metadata.namespace", "../../etc", "metadata.namespace", "at most 63 of a-z"),
    ("metadata.uid", "../../etc", "metadata.uid", "letters, digits"),
    ("metadata.finalizers", 3, "metadata.finalizers", "a list"),
    ("metadata.finalizers", True, "metadata.finalizers", "a list"),
    ("metadata.labels", "team=a", "metadata.labels", "a mapping"),
    ("metadata.generation", 10**400, "metadata.generation", "whole number"),
    (f"{TRAINER}.command", [""], "spec.template.spec.containers[0].command[0]", "the name of a program"),
    (f"{TRAINER}.command.1", "a\0b", "spec.template.spec.containers[0].command[1]", "NUL"),
    (f"{TRAINER}.workingDir", "/a\0b", "spec.template.spec.containers[0].workingDir", "NUL"),
    (f"{TRAINER}.args", ["\ud800"], "spec.template.spec.containers[0].args[0]", "UTF-8"),
    (f"{TRAINER}.volumeMounts", "a", "spec.template.spec.containers[0].volumeMounts", "a list"),
    (f"{TRAINER}.resources", {"limits": 3}, "spec.template.spec.containers[0].resources.limits", "a mapping"),
    ("spec.template.spec.containers.1", "text", "spec.template.spec.containers[1]", "a mapping"),
    ("spec.template.spec.volumes", {"a": 1}, "spec.template.spec.volumes", "a list"),
    ("spec.template.spec.affinity", "near", "spec.template.spec.affinity", "a mapping"),
    ("spec.template.spec.terminationGracePeriodSeconds", -1, "", "at least 0"),
    ("spec.template.spec.terminationGracePeriodSeconds", [1], "", "whole number"),
    ("spec.template.spec.terminationGracePeriodSeconds", "null", "", "whole number"),
    ("spec.template.metadata", "text", "spec.template.metadata", "a mapping"),
    ("spec.template.metadata", {"labels": {"a": 1}}, "spec.template.metadata.labels", "text"),
    ("spec.runPolicy.backoffLimit", 10**308, "spec.runPolicy.backoffLimit", "up to"),
]


@pytest.mark.parametrize(("path", "value", "where", "allowed"), NONSENSE, ids=range(len(NONSENSE)))
def test_what_no_program_no_pod_and_no_clock_could_take_is_refused(
    path: str, value: object, where: str, allowed: str
) -> None:
    body = changed(path, value) if not path.endswith("containers.1") else copy.deepcopy(SMALLEST)
    if path.endswith("containers.1"):
        body["spec"]["template"]["spec"]["containers"].append(value)
    with pytest.raises(SpecError) as caught:
        parse_job(body)
    assert (caught.value.path if where else "") == where
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["a" * 100_000, 10**5000, ["b" * 50_000] * 50, {"c" * 100_000: 1}, -(10**4000)],
    ids=["text", "number", "list", "key", "below"],
)
@pytest.mark.parametrize("path", ["metadata.name", "spec.replicas", "spec.managedBy", f"{TRAINER}.name"])
def test_a_refusal_never_repeats_more_than_a_glance(path: str, value: object) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(changed(path, value))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "path",
    [
        "spec.elasticPolicy.gracefulShutdownTimeoutSeconds",
        "spec.runPolicy.schedulingPolicy",
        "spec.checkpoint.onEviction",
    ],
)
def test_a_field_that_is_not_acted_upon_yet_is_refused_by_name(path: str) -> None:
    with pytest.raises(SpecError, match="not supported") as caught:
        parse_job(changed(path, 1))
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("said", "adaptive", "base", "fixed"),
    [({}, False, 10, 100), ({"intervalSteps": 1}, False, 1, 1), ({"intervalSeconds": 2.5}, True, 1, None),
     ({"interval": "auto"}, True, 1, None)],
)  # fmt: skip
def test_an_interval_is_said_in_steps_or_seconds_or_left_to_the_operator(
    said: dict[str, object], adaptive: bool, base: int, fixed: int | None
) -> None:
    both = {"memory": said, "persistent": {"uri": "file:///a", **said}}
    checkpoint = parse_job(changed("spec.checkpoint", both)).spec.checkpoint
    assert checkpoint.persistent is not None
    assert (checkpoint.memory.is_adaptive, checkpoint.persistent.is_adaptive) == (adaptive, adaptive)
    assert (checkpoint.memory.base_steps, checkpoint.persistent.fixed_steps) == (base, fixed)


def test_what_is_left_out_has_the_documented_default() -> None:
    spec = parse_job(SMALLEST).spec
    assert spec.health_policy == HealthPolicy(0.5, 3.0, 600.0)
    assert spec.checkpoint.memory == MemoryTierSpec(replicas=2, keep=2)
    assert (spec.checkpoint.memory.base_steps, spec.checkpoint.memory.is_adaptive) == (10, False)
    assert spec.elastic_policy is not None
    assert spec.elastic_policy.scale_up_snooze_seconds is spec.elastic_policy.faulty_scale_down_timeout_seconds is None
    assert (spec.checkpoint.flush_grace_seconds, spec.checkpoint.memory_server_timeout_seconds) == (1.0, 10.0)
    assert spec.checkpoint.on_total_loss == "Wait"
    assert spec.failure_policy.rules[0].on_exit_codes.values == (42,)


@pytest.mark.parametrize(
    ("given", "wanted", "older"),
    [
        ({"uid": "old"}, RestoreFrom(uid="old"), SourceJob("s3://bucket/prefix", "old")),
        ({"uid": "old", "step": 40}, RestoreFrom(uid="old", step=40), SourceJob("s3://bucket/prefix", "old")),
        ({"uri": "s3://b/old", "step": "latest"}, RestoreFrom(uri="s3://b/old"), SourceJob("s3://b", "old")),
        ({"uri": "file:///ckpt/old/"}, RestoreFrom(uri="file:///ckpt/old/"), SourceJob("file:///ckpt", "old")),
        ({"uri": "file:///old"}, RestoreFrom(uri="file:///old"), SourceJob("file:///", "old")),
    ],
)
def test_an_older_jobs_checkpoints_are_named_by_uid_or_by_folder(
    given: dict[str, Any], wanted: RestoreFrom, older: SourceJob
) -> None:
    policy = parse_job(changed("spec.checkpoint.restoreFrom", given)).spec.checkpoint
    assert policy.restore_from == wanted
    assert source_job(policy) == older


def test_an_older_jobs_folder_needs_no_persistent_tier() -> None:
    parse_job(changed("spec.checkpoint", {"restoreFrom": {"uri": "file:///ckpt/old"}}))


def test_bytes_are_read_as_kubernetes_writes_them() -> None:
    job = parse_job(changed("spec.checkpoint.memory.sizeLimit", "1.5Gi"))
    assert job.spec.checkpoint.memory.size_limit_bytes == 3 * 2**29


def test_a_memory_limit_that_the_smallest_world_cannot_keep_is_refused() -> None:
    body = changed("spec.checkpoint.expectedBytes", "1Gi")
    body["spec"]["checkpoint"]["memory"]["sizeLimit"] = "3Gi"
    with pytest.raises(SpecError, match=r"memory.sizeLimit: '3Gi' .*at least 4Gi a node are needed, because 2 workers"):
        parse_job(body)
    body["spec"]["checkpoint"]["memory"]["sizeLimit"] = "4Gi"
    parse_job(body)


def test_the_check_of_a_memory_limit_counts_what_the_budget_counts() -> None:
    """Without a persistent tier no checkpoint is pinned; a rollback needs two more."""
    body = changed("spec.checkpoint.persistent", ...)
    body["spec"]["checkpoint"] |= {"expectedBytes": "1Gi"}
    body["spec"]["checkpoint"]["memory"]["sizeLimit"] = "3Gi"
    assert checkpoints_in_memory(parse_job(body).spec) == 3
    body["spec"].setdefault("healthPolicy", {})["numerics"] = {}
    with pytest.raises(SpecError, match="store 5 checkpoints at a time"):
        parse_job(body)
    body["spec"]["checkpoint"]["memory"]["sizeLimit"] = "5Gi"
    assert checkpoints_in_memory(parse_job(body).spec) == 5


@pytest.mark.parametrize(
    "body",
    [
        changed("spec.checkpoint.persistent.uri", "s3://key:hunter2@bucket/prefix"),
        changed("spec.checkpoint.persistent.endpoint", "https://key:hunter2@s3.example"),
        changed("spec.checkpoint.persistent.secretKey", "hunter2"),
        changed("spec.checkpoint.restoreFrom", {"uri": "s3://key:hunter2@bucket/prefix/old"}),
        changed(f"{TRAINER}.env", [{"name": "PASSWORD", "value": ["hunter2"]}]),
        changed(f"{TRAINER}.env", "hunter2"),
    ],
)
def test_a_refusal_does_not_repeat_a_secret(body: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(body)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("kind: [TrainingJob\npassword: hunter2", "line 2"),
        ("kind: a\nkind: b", "'kind' is not allowed; each field may occur once"),
        ("", "exactly one"),
        ("a: 1\n---\na: 2", "exactly one"),
        ("just words", "mapping"),
        ("a: !!python/object/apply:os.system ['true']", "not YAML"),
        ("a: \x00", "not YAML"),
        ("a: &x [*x]", "contains itself"),
    ],
)
def test_yaml_that_is_none_says_where_and_shows_no_content(content: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(load_yaml(content))
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_yaml_reads_as_its_mapping_does() -> None:
    assert parse_job(load_yaml(yaml.safe_dump(SMALLEST))) == parse_job(SMALLEST)


def test_an_alias_that_contains_itself_is_refused() -> None:
    body = copy.deepcopy(SMALLEST)
    body["spec"]["template"]["metadata"] = loop = {}
    loop["again"] = loop
    with pytest.raises(SpecError, match="no deeper than 64"):
        parse_job(body)


def test_a_template_that_names_a_group_of_its_own_is_refused_beside_a_policy() -> None:
    label = "scheduling.x-k8s.io/pod-group"
    body = changed("spec.template.metadata", {"labels": {label: "mine"}})
    parse_job(body)  # somebody else's group, without a policy here
    body["spec"]["schedulingPolicy"] = {"gang": "Coscheduling"}
    with pytest.raises(SpecError, match=f"the job's own group: metadata.labels {label}") as caught:
        parse_job(body)
    assert caught.value.path == "spec.template.metadata"
