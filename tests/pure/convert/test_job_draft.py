"""Tests of `convert.job_draft`."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.foreign_jobs import ALL, hyperpod_job, job_set, one, pod, pytorch_job, runtime, train_job
from surefoot_operator.api.parse import parse_job
from surefoot_operator.convert.job_draft import (
    LauncherCommand,
    parse_launcher_command,
    render_yaml,
    replace_launcher,
    shell_script_index,
)
from surefoot_operator.convert.manifest import NotConvertible

# ---- launcher --------------------------------------------------------------------------------------------------------
# What launchers' command lines say, and scripts without them.


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun train.py --lr 1", LauncherCommand(("python", "train.py", "--lr", "1"))),
        ("/opt/bin/torchrun --nnodes=2 --nproc_per_node 8 a.py", LauncherCommand(("python", "a.py"), "2", "8")),
        ("torchrun --nnodes 1:4 --max-restarts=3 a.py", LauncherCommand(("python", "a.py"), "1:4", "", "3")),
        (
            "python -u -m torch.distributed.run --standalone a.py",
            LauncherCommand(("python", "a.py"), dropped=("--standalone",)),
        ),
        (
            "python3 -m torch.distributed.launch --use_env a.py",
            LauncherCommand(("python", "a.py"), dropped=("--use-env",)),
        ),
        ("torchrun -m pkg.train -x", LauncherCommand(("python", "-m", "pkg.train", "-x"))),
        ("torchrun --no-python /bin/train --fast", LauncherCommand(("/bin/train", "--fast"))),
        (
            "hyperpodrun --tee=3 --log_dir /tmp a.py",
            LauncherCommand(("python", "a.py"), dropped=("--tee", "--log-dir")),
        ),
        (
            "torchrun --nproc_per_node=auto a.py --nnodes 9",
            LauncherCommand(("python", "a.py", "--nnodes", "9"), "", "auto"),
        ),
    ],
)
def test_a_launchers_options_are_told_apart_from_the_programs(line: str, said: LauncherCommand) -> None:
    assert parse_launcher_command(line.split()) == said


@pytest.mark.parametrize(
    "line", ["", "python train.py", "python -m pkg.train", "python -c 1 -m torch.distributed.run", "bash torchrun.sh"]
)
def test_other_commands_start_no_launcher(line: str) -> None:
    assert parse_launcher_command(line.split()) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun --nnodes 2", "starts no program"),
        ("torchrun --nnodes", "option --nnodes"),
        ("torchrun --colour red a.py", "option --colour"),
        ("accelerate launch a.py", "`accelerate` starts the ranks"),
        ("/usr/bin/deepspeed a.py", "`deepspeed` starts the ranks"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(NotConvertible, match=said):
        parse_launcher_command(line.split())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torchrun --nproc_per_node=2 a.py --x $X\n", "exec python a.py --x $X\n"),
        ("torchrun \\\n  --nnodes=2 \\\n  a.py --text 'a  b'", "exec python a.py --text 'a  b'"),
        ("set -e; pip install -q x && torchrun a.py", "set -e; pip install -q x && exec python a.py"),
        ("echo torchrun\ntorchrun a.py\necho done", "echo torchrun\npython a.py\necho done"),
        ("exec torchrun a.py", "exec python a.py"),
        ("A=1 torchrun a.py", "export A=1; exec python a.py"),
        ("A=1 torchrun a.py; ls", "A=1 python a.py; ls"),
        ("# torchrun is next\ntorchrun a.py 2>&1 | tee log", "# torchrun is next\npython a.py 2>&1 | tee log"),
        ("time torchrun a.py", "time python a.py"),
        ('torchrun a.py "$(date; ls)" `date`', 'exec python a.py "$(date; ls)" `date`'),
    ],
)
def test_only_the_launcher_goes_out_of_a_script(before: str, after: str) -> None:
    assert replace_launcher(before).text == after


def test_a_script_tells_what_it_sets() -> None:
    found = replace_launcher("export N=8\nM='2'\ntorchrun --nproc_per_node=$N --nnodes=${M} a.py")
    assert found.variables == {"N": "8", "M": "2"}
    assert found.launch is not None
    assert (found.launch.ranks, found.launch.nodes) == ("$N", "${M}")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("torchrun a.py && torchrun b.py", "more than once"),
        ("cat <<E\nE\ntorchrun a.py", "here-document"),
        ("torchrun 'a.py", "cannot be parsed"),
    ],
)
def test_a_script_that_is_not_understood_is_refused(script: str, said: str) -> None:
    with pytest.raises(NotConvertible, match=said):
        replace_launcher(script)


@given(st.text(alphabet="ab \t\n;&|\\'\"`$(){}#<>=-", max_size=60))
def test_a_script_without_a_launcher_stays_as_it_is(script: str) -> None:
    try:
        assert replace_launcher(script).text == script
    except NotConvertible as refused:
        assert "\n" not in str(refused)  # noqa: PT017  # either is right


@given(
    st.lists(st.sampled_from(["A=1", "export B='x y'", "true", "echo 'a;b' \"c&d\"", "# note", ""]), max_size=4),
    st.lists(st.sampled_from(["--x", "'a b'", '"$A"', "\\;", "$(echo q)", "c=d"]), max_size=4),
)
def test_the_rewritten_script_gives_the_program_the_words_that_the_launcher_would_have(
    before: list[str], words: list[str]
) -> None:
    """Judged by a shell: both scripts print the words of their last command."""
    show = "python() { shift; printf '%s\\n' \"$@\"; }; torchrun() { shift 2; printf '%s\\n' \"$@\"; }\n"
    given = "\n".join([*before, "torchrun --nnodes=2 a.py " + " ".join(words)])
    rewritten = replace_launcher(given).text.replace("exec python", "python")
    told = [
        subprocess.run(["sh", "-c", show + text], capture_output=True, text=True, check=True).stdout
        for text in (given, rewritten)
    ]
    assert told[0] == told[1]


def test_a_shells_script_is_found_behind_its_options() -> None:
    assert shell_script_index(["/bin/bash", "-x", "-ec", "script", "name"]) == 3
    assert shell_script_index(["bash", "script.sh"]) is None
    assert shell_script_index(["python", "-c", "1"]) is None


# ---- left out --------------------------------------------------------------------------------------------------------
# Nothing of another system's job goes without a word.

CLAIMS = [{"templates": [{"metadata": {"name": "data"}, "spec": {}}], "retentionPolicy": {"whenDeleted": "Retain"}}]


def mounting(volume: str) -> dict[str, Any]:
    container = {"name": "node", "command": ["torchrun", "a.py"], "volumeMounts": [{"name": volume, "mountPath": "/d"}]}
    return {"spec": {"containers": [container], "volumes": [{"name": "scratch", "emptyDir": {}}]}}


def test_claims_that_another_controller_made_are_named_and_so_are_the_mounts_that_miss_them() -> None:
    job = job_set()
    job["spec"]["volumeClaimPolicies"] = CLAIMS
    job["spec"]["replicatedJobs"][1]["template"]["spec"]["template"] = mounting("data")
    found, _ = one(job)
    text = render_yaml(found)
    assert "spec.volumeClaimPolicies: create the claims yourself and name them in spec.template.spec.volumes" in text
    assert any(told.startswith("spec.template.spec.volumes lacks data,") for told in found.to_do)
    job["spec"]["replicatedJobs"][1]["template"]["spec"]["template"] = mounting("scratch")
    assert not any("lacks" in told for told in one(job)[0].to_do)


@pytest.mark.parametrize("path", [(), ("replicaSpecs", 0)])
def test_claims_of_a_hyperpod_job_are_named_wherever_they_stand(path: tuple[Any, ...]) -> None:
    job = hyperpod_job()
    at = job["spec"]
    for key in path:
        at = at[key]
    at["volumeClaimPolicies"] = CLAIMS
    text = "spec.replicaSpecs[0].volumeClaimPolicies" if path else "spec.volumeClaimPolicies"
    assert {note.text for note in one(job)[0].skipped_fields if note.path == text} == {
        "create the claims yourself and name them in spec.template.spec.volumes"
    }


def test_what_a_runtime_says_and_nobody_reads_is_named() -> None:
    other = runtime()
    other["spec"]["podGroupPolicy"] = {"volcano": {"networkTopology": {"mode": "hard"}}, "other": {"a": 1}}
    other["spec"]["mlPolicy"]["mpi"] = {"mpiImplementation": "OpenMPI"}
    inner = other["spec"]["template"]["spec"]
    inner["volumeClaimPolicies"] = CLAIMS
    inner["replicatedJobs"].insert(0, {"name": "dataset-initializer", "template": {}})
    left = {note.path: note.text for note in one(train_job(), other)[0].skipped_fields}
    for path in (
        "torch:.spec.podGroupPolicy.volcano",
        "torch:.spec.podGroupPolicy.other.a",
        "torch:.spec.mlPolicy.mpi.mpiImplementation",
        "torch:.spec.template.spec.volumeClaimPolicies",
        "torch:.spec.template.spec.replicatedJobs[0]",
    ):
        assert path in left


def test_what_only_the_pods_template_or_the_server_had_is_named() -> None:
    job = pytorch_job()
    job["metadata"] |= {"annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"}, "generation": 3}
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "OnFailure"
    for role in ("Master", "Worker"):
        template = {**pod(), "metadata": {"name": "pod", "labels": {"a": "b"}}}
        job["spec"]["pytorchReplicaSpecs"][role]["template"] = template
    found, _ = one(job)
    left, root = {note.path for note in found.skipped_fields}, "spec.pytorchReplicaSpecs"
    assert {
        "status",
        "metadata.uid",
        "metadata.generation",
        "metadata.annotations[kubectl.kubernetes.io/last-applied-configuration]",
        f"{root}.Worker.restartPolicy",
        f"{root}.Master.template.metadata.name",
        f"{root}.Master.template.spec.containers[1].name",
        f"{root}.Master.template.spec.restartPolicy",
    } <= left
    taken = {note.path: note.text for note in found.used_fields}
    assert taken[f"{root}.Master.restartPolicy"] == "spec.failurePolicy.rules"


TOLD_BY_THE_TITLE = ("apiVersion", "kind")
KEPT_AS_IT_IS = ("metadata.name", "metadata.namespace", "metadata.labels.a")


def leaves(tree: Any, path: str = "") -> list[str]:
    """Each value's own path."""
    if isinstance(tree, dict):
        return [one for key, value in tree.items() for one in leaves(value, f"{path}.{key}" if path else key)]
    if isinstance(tree, list) and any(isinstance(one, dict | list) for one in tree):
        return [one for place, value in enumerate(tree) for one in leaves(value, f"{path}[{place}]")]
    return [path]


@pytest.mark.parametrize("make", ALL)
def test_each_value_of_a_job_is_taken_over_or_left_with_a_word(make: Any) -> None:
    found, _ = one(make())
    told = [note.path for note in (*found.used_fields, *found.skipped_fields)]
    silent = [
        leaf
        for leaf in leaves(make())
        if leaf not in (*TOLD_BY_THE_TITLE, *KEPT_AS_IT_IS)
        and not any(leaf == path or leaf.startswith((f"{path}.", f"{path}[")) for path in told)
    ]
    assert silent == []


# ---- gang policy -----------------------------------------------------------------------------------------------------
# Which gang scheduler another system's job is placed by, where anything says it.

PLACE = "spec.runPolicy.schedulingPolicy"


def kubeflow(policy: dict[str, Any], scheduler_name: str | None = None) -> dict[str, Any]:
    job = pytorch_job()
    job["spec"]["runPolicy"]["schedulingPolicy"] = policy
    for role in ("Master", "Worker"):
        if scheduler_name is not None:
            job["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]["schedulerName"] = scheduler_name
    return job


@pytest.mark.parametrize(
    ("policy", "scheduler_name", "wanted", "deadline"),
    [
        ({"queue": "q"}, None, None, None),
        ({"minAvailable": 2, "priorityClass": "high", "scheduleTimeoutSeconds": 30}, "volcano", None, 30),
        (
            {"minAvailable": 2, "scheduleTimeoutSeconds": 30},
            "scheduler-plugins-scheduler",
            {"gang": "Coscheduling", "scheduleTimeoutSeconds": 30},
            None,
        ),
        ({"scheduleTimeoutSeconds": 30}, None, None, 30),
        ({"minAvailable": 4}, None, None, None),
    ],
)
def test_the_pods_scheduler_tells_whose_gang_it_is(
    policy: dict[str, Any], scheduler_name: str | None, wanted: dict[str, Any] | None, deadline: int | None
) -> None:
    found, job = one(kubeflow(policy, scheduler_name))
    assert found.job["spec"].get("schedulingPolicy") == wanted
    assert found.job["spec"]["runPolicy"].get("schedulingDeadlineSeconds") == deadline
    assert job.spec == parse_job(found.job).spec
    asked = any(told.startswith("spec.schedulingPolicy: set gang to Coscheduling") for told in found.to_do)
    assert asked == (wanted is None and "minAvailable" in policy)
    left = {note.path: note.text for note in found.skipped_fields}
    for name in ("minAvailable", "queue"):
        assert (f"{PLACE}.{name}" in left) == (name in policy)
    priority = found.job["spec"]["template"]["spec"].get("priorityClassName")
    assert priority == policy.get("priorityClass")


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ({"coscheduling": {}}, {"gang": "Coscheduling"}),
        ({"coscheduling": {"scheduleTimeoutSeconds": 60}}, {"gang": "Coscheduling", "scheduleTimeoutSeconds": 60}),
    ],
)
def test_a_training_runtime_names_its_gang_scheduler(policy: dict[str, Any], wanted: dict[str, Any]) -> None:
    other = runtime()
    other["spec"]["podGroupPolicy"] = policy
    found, _ = one(train_job(), other)
    assert found.job["spec"]["schedulingPolicy"] == wanted
    assert not any("podGroupPolicy" in note.path for note in found.skipped_fields)
