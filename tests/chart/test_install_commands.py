"""The commands that lead from an empty machine to a recovered job name what is there, in an order in which they can run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart import helm
from chart.walkthrough import PAGE, commands
from images.recipes import RECIPES
from surefoot_operator.platforms.kubernetes import api_objects

CONDITIONS = {"Complete", "CheckpointProtected", "Ready"}


def position(*words: str) -> int:
    """Of the one command that begins with these words."""
    [found] = [number for number, command in enumerate(commands()) if tuple(command[: len(words)]) == words]
    return found


def option(command: list[str], name: str) -> str:
    """The value of an option, given as its own word or behind `=`."""
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word == name:
            return after
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    raise AssertionError(f"{name} is not in {command}")


def document(path: str) -> dict[str, Any]:
    """A file that a command names."""
    return dict(yaml.safe_load((helm.PROJECT / path).read_text(encoding="utf-8")))


def jobs_made_before(number: int) -> dict[str, dict[str, Any]]:
    """Name → document of what was applied."""
    applied = [word for command in commands()[:number] if command[:2] == ["kubectl", "apply"] for word in command[2:]]
    texts = [(helm.PROJECT / word).read_text(encoding="utf-8") for word in applied if word != "-f"]
    found = [one for text in texts for one in yaml.safe_load_all(text)]
    return {one["metadata"]["name"]: one for one in found if one["kind"] == "TrainingJob"}


def images_of(path: Path) -> set[str]:
    """Every image that a file names."""
    return set(re.findall(r"^\s+image: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_program_is_one_that_the_page_asks_for() -> None:
    assert {command[0] for command in commands()} == {"make", "kind", "helm", "kubectl", "docker"}


def test_each_target_and_each_file_exists() -> None:
    makefile = (helm.PROJECT / "Makefile").read_text(encoding="utf-8")
    for command in commands():
        if command[0] == "make":
            assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE), command
        for word in command:
            if "/" in word and word.endswith((".yaml", "charts/surefoot")):
                assert (helm.PROJECT / word).exists(), word


def test_a_command_within_a_sentence_is_one_that_is_run_or_is_there() -> None:
    """The walk on kind runs the blocks; what a sentence names is a part of them, a target of make, or a command of ours."""
    text = re.sub(r"^```.*?^```$", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    makefile = (helm.PROJECT / "Makefile").read_text(encoding="utf-8")
    ours = (helm.PROJECT / "docs" / "cli.md").read_text(encoding="utf-8")
    run = {tuple(command[: len(command) - less]) for command in commands() for less in range(len(command))}
    programs = {command[0] for command in commands()} | {"surefoot", "python"}
    for found in re.findall(r"`([^`]+)`", text):
        words = tuple(found.split())
        if words[0] not in programs or len(words) == 1 or words in run:
            continue
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:|^\.PHONY:.* {words[1]}\b", makefile, re.MULTILINE), found
        elif words[0] == "surefoot":
            assert f"## {found}\n" in ours
        else:
            assert words == ("python", "-m", "kind", "first-hour"), found


def test_the_steps_stand_in_an_order_in_which_they_can_run() -> None:
    order = [
        position("make", "images"),
        position("kind", "create"),
        position("kind", "load"),
        position("helm", "install"),
        position("kubectl", "--namespace", "surefoot-system", "rollout"),
        position("helm", "test"),
        position("docker", "kill"),
        position("docker", "start"),
        position("kind", "delete"),
    ]
    assert order == sorted(order)


def test_what_is_loaded_is_what_was_built_and_what_chart_and_examples_name() -> None:
    version = document("charts/surefoot/Chart.yaml")["appVersion"]
    built = {f"surefoot/{recipe.name}:{version}" for recipe in RECIPES}
    assert set(commands()[position("kind", "load")][3:]) == built
    named = {image for path in (helm.PROJECT / "examples").rglob("*.yaml") for image in images_of(path)}
    ours = {image for image in named if image.startswith("surefoot/")}
    assert ours == {f"surefoot/runtime:{version}"}
    pods = [one for one in helm.objects() if one["kind"] in ("Deployment", "DaemonSet")]
    used = {c["image"] for one in pods for c in one["spec"]["template"]["spec"]["containers"]}
    assert {image for image in used if image.startswith("surefoot/")} == {f"surefoot/operator:{version}"}


def test_the_chart_takes_the_values_and_makes_what_is_waited_for() -> None:
    install = commands()[position("helm", "install")]
    rendered = helm.helm("template", *install[2:4], "--set", option(install, "--set"))
    names = {(one["kind"].lower(), one["metadata"]["name"]) for one in yaml.safe_load_all(rendered) if one}
    for command in commands():
        for kind, name in re.findall(r"\b(deployment|daemonset)/(\S+)", " ".join(command)):
            assert (kind, name) in names
    parts = {one["metadata"].get("labels", {}).get("surefoot.dev/part") for one in yaml.safe_load_all(rendered) if one}
    waited = commands()[position("kubectl", "--namespace", "surefoot-system", "wait")]
    assert option(waited, "--selector").partition("=")[2] in parts


@pytest.mark.parametrize("number", [n for n, c in enumerate(commands()) if c[:2] == ["kubectl", "wait"]])
def test_what_is_waited_for_can_come(number: int) -> None:
    command = commands()[number]
    job = jobs_made_before(number)[command[2].removeprefix("trainingjob/")]
    wanted = option(command, "--for")
    assert option(command, "--timeout")
    if wanted.startswith("condition="):
        assert wanted.removeprefix("condition=") in CONDITIONS
        conditions = (helm.PROJECT / "docs" / "api.md").read_text(encoding="utf-8")
        assert f"| `{wanted.removeprefix('condition=')}` |" in conditions
        return
    size = int(wanted.removeprefix("jsonpath={.status.membership.worldSize}="))
    policy, ranks = job["spec"]["elasticPolicy"], job["spec"]["nprocPerNode"]
    assert size % ranks == 0
    assert policy["minReplicas"] <= size // ranks <= policy["maxReplicas"]


def test_pods_are_asked_for_by_the_label_that_they_bear() -> None:
    asked = position("kubectl", "get", "pods")
    label, _, name = option(commands()[asked], "--selector").partition("=")
    assert label == api_objects.JOB_NAME_LABEL
    assert name in jobs_made_before(asked)


def test_no_log_is_asked_of_a_node_that_was_killed() -> None:
    """`kubectl logs` fails where one of the pods is on a node that does not answer, and says nothing of the others."""
    killed, back = position("docker", "kill"), position("docker", "start")
    assert [command for command in commands()[killed:back] if command[:2] == ["kubectl", "logs"]] == []


def test_the_world_is_whole_before_a_node_is_killed() -> None:
    """An elastic job may begin smaller: what is waited for after the kill would be there before it."""
    whole = [option(c, "--for") for c in commands()[: position("docker", "kill")] if "trainingjob/elastic" in c]
    after = [option(c, "--for") for c in commands()[position("docker", "kill") :] if "trainingjob/elastic" in c]
    assert "jsonpath={.status.membership.worldSize}=6" in whole
    assert after == ["jsonpath={.status.membership.worldSize}=4", "jsonpath={.status.membership.worldSize}=6"]


def test_the_node_that_is_killed_is_a_worker_of_that_cluster_and_comes_back() -> None:
    workers = [node for node in document("examples/kind.yaml")["nodes"] if node["role"] == "worker"]
    names = {f"kind-worker{number if number > 1 else ''}" for number in range(1, len(workers) + 1)}
    killed = commands()[position("docker", "kill")][2]
    assert killed in names
    assert commands()[position("docker", "start")][2] == killed
    assert len(workers) >= document("examples/cluster/elastic.yaml")["spec"]["replicas"]


def test_every_example_of_a_job_is_applied() -> None:
    """The one with S3 was never run as it is: no command led to it."""
    examples = {path.stem for path in (helm.PROJECT / "examples" / "cluster").glob("*.yaml")}
    applied = {Path(word).stem for command in commands() if command[:2] == ["kubectl", "apply"] for word in command}
    assert examples <= applied


def test_the_s3_server_is_the_one_that_the_example_asks() -> None:
    text = (helm.PROJECT / "examples" / "s3-server.yaml").read_text(encoding="utf-8")
    secret, service, deployment = yaml.safe_load_all(text)
    tier = document("examples/cluster/s3.yaml")["spec"]["checkpoint"]["persistent"]
    assert tier["secretRef"] == secret["metadata"]["name"]
    [port] = service["spec"]["ports"]
    address = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{port['port']}"
    assert tier["endpoint"] == f"http://{address}"
    pod = deployment["spec"]["template"]["spec"]
    bucket = tier["uri"].removeprefix("s3://").partition("/")[0]
    assert f"{pod['containers'][0]['args'][-1]}/{bucket}" in pod["initContainers"][0]["command"]
