"""Every command that a page shows is run by a test, and which one is said here; ours also parse as they are written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot_operator.cli.main import build_parser

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

PROGRAMS = "tests/integration/test_documented_programs.py"
HOUR = "tests/chart/walkthrough.py"
"""What `make test-kind` walks: each line of that page as it stands there."""
LINE = "tests/cluster/test_scenario_command_line.py"
DELIVERY = "tests/kind/test_chart_delivery.py"
CHART = "tests/cluster/test_chart_cluster.py"
TOOL = "tests/cluster/test_tool.py"
CONVERT = "tests/pure/convert/test_conversion.py"
EXPORT = "tests/integration/test_export.py"

RUN: dict[str, tuple[str, str]] = {
    "python train.py": (PROGRAMS, 'block("sh", "python")'),
    "torchrun --nproc-per-node=2 train.py": (PROGRAMS, 'block("sh", "torchrun --nproc")'),
    "torchrun --rdzv-backend=surefoot": (PROGRAMS, 'block("sh", "torchrun --rdzv-backend")'),
    "surefoot local -f job.yaml": (PROGRAMS, "test_the_documented_job_as_pasted"),
    "surefoot validate -f job.yaml": (PROGRAMS, "surefoot validate"),
    "make demo": ("tests/images/test_runtime_image.py", '"local", "-f", "examples/gpt.yaml"'),
    "make test ": (".ci/run", "exec make test"),
    "make setup": ("Makefile", "test: system $(VENV)/.ready"),  # the environment in which the gate runs
    "make test-quick": ("Makefile", "test-quick: $(VENV)/.ready"),
    "make images": (HOUR, "first-hour.md"),
    "pip install '.[runtime]'": ("tests/images/test_runtime_image.py", "test_three_lines_bring_surefoot"),
    "pip install '.[cli,runtime,embedded-redis]'": ("tests/release/__main__.py", "[cli,operator]"),
    "docker push registry.example": ("tests/kind/test_registry_pull.py", "push"),
    "helm package charts/surefoot": (DELIVERY, 'helm.helm("package"'),
    "helm push": (DELIVERY, 'helm.helm("push"'),
    "helm install surefoot oci://": (DELIVERY, "oci://{registry}/charts/surefoot"),
    "helm install surefoot charts/surefoot": (HOUR, "first-hour.md"),
    "helm test surefoot": (HOUR, "first-hour.md"),
    "helm upgrade surefoot charts/surefoot": (CHART, "test_an_upgrade_replaces_the_operator"),
    "helm uninstall surefoot": (DELIVERY, "test_uninstalled_as_it_is_written_nothing_is_left"),
    "kubectl apply --server-side -f manifests/crd.yaml": (CHART, "test_the_server_accepts_the_manifests"),
    "kubectl apply -f examples/cluster/minimal.yaml": (HOUR, "first-hour.md"),
    "kubectl get trainingjobs": (HOUR, "first-hour.md"),
    "kubectl --namespace surefoot-system rollout status": (HOUR, "first-hour.md"),
    "kubectl delete": (DELIVERY, "test_uninstalled_as_it_is_written_nothing_is_left"),
    "kubectl drain NODE": ("tests/cluster/test_scenario_drained.py", '"drain"'),
    "kubectl get nodes": (TOOL, "kubectl get nodes"),
    "kubectl create -f -": (LINE, '"create", "-f", "-"'),
    "surefoot convert": (CONVERT, "test_the_page_s_commands"),
    "surefoot list": (LINE, '"list"'),
    "surefoot timeline": (LINE, '"timeline"'),
    "surefoot describe": (LINE, '"describe"'),
    "surefoot logs": (LINE, '"logs"'),
    "surefoot suspend": (LINE, '"suspend"'),
    "surefoot fork": (LINE, '"fork"'),
    "surefoot local --nodes 3": ("tests/integration/test_local_without_yaml.py", '"--nodes", "3"'),
    "surefoot doctor": (LINE, '"doctor"'),
    "surefoot report": ("tests/pure/cli/local/test_run_report.py", "--run-folder"),
    "surefoot checkpoints export": (EXPORT, '"checkpoints", "export"'),
    "surefoot checkpoints import": (PROGRAMS, "surefoot checkpoints import"),
    "surefoot-operator --kubeconfig": ("tests/cluster/operator_process.py", '"--coordinator-url"'),
    "make cluster-up": (TOOL, "chosen.up(3)"),
    "make cluster-down": (TOOL, "test_down_takes_a_hurt_cluster_away_whole"),
    "eval": (TOOL, "test_its_environment_leads_kubectl_to_it"),
    "make kind-up": ("Makefile", "test-kind:"),
    "make kind-down": ("Makefile", "$(KIND) down"),
    "PYTHONPATH=tests .venv/bin/python -m kind exec": ("Makefile", "$(KIND) exec"),
}
"""How a command begins, the file that runs it, and what is to be found there."""


def commands(page: Path) -> Iterator[str]:
    """Each command of a page's shell blocks, without its comment; of a console's, those behind `$`."""
    for kind, text in re.findall(
        r"^```(sh|console)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        for line in text.replace("\\\n", " ").splitlines():
            if kind == "console" and not line.startswith("$ "):
                continue
            words = shlex.split(line.removeprefix("$ "), comments=True, posix=False)
            yield from (one.strip() for one in re.split(r"&&| \| ", " ".join(words)) if one.strip())


SHOWN = [(page.relative_to(ROOT).as_posix(), one) for page in PAGES for one in commands(page)]


@pytest.mark.parametrize(("page", "command"), SHOWN, ids=[f"{page}: {one}" for page, one in SHOWN])
def test_a_test_runs_it(page: str, command: str) -> None:
    if page == "docs/first-hour.md":
        return  # whole, by the walk on kind
    begun = [one for one in RUN if f"{command} ".startswith(one)]
    assert begun, f"no test runs `{command}`: have one run it, and say here which"
    file, needle = RUN[max(begun, key=len)]
    assert needle in (ROOT / file).read_text(encoding="utf-8"), (file, needle)


def test_no_command_is_told_of_that_no_page_shows() -> None:
    assert [one for one in RUN if not any(f"{command} ".startswith(one) for _, command in SHOWN)] == []


OURS = [one for _, one in SHOWN if one.startswith("surefoot ")]


@pytest.mark.parametrize("command", OURS)
def test_ours_parses(command: str) -> None:
    words = shlex.split(command)[1:]
    build_parser("surefoot").parse_args(words[: words.index(">")] if ">" in words else words)


def test_targets_of_make_are_there() -> None:
    for page, command in SHOWN:
        if command.startswith("make "):
            assert re.search(rf"^(\.PHONY:.* )?{command.split()[1]}\b", MAKEFILE, re.MULTILINE), (page, command)
