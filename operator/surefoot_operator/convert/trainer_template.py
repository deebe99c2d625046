"""Turns another system's pod template into a TrainingJob's.

Pure. The container that trains is named `trainer`, its launcher is taken out, and what agents set is not set twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot_operator.api.pod_template import TRAINER
from surefoot_operator.convert.conversion_errors import NotConvertible
from surefoot_operator.convert.launcher import Launch, read_launch, starts_ranks
from surefoot_operator.convert.manifest import Note, dotted
from surefoot_operator.convert.shell_script import shell_of, unquoted, without_launcher

RESTARTS = "the operator restarts ranks, no kubelet does"
UNKNOWN_COMMAND = "CHANGE-ME"
SET_BY_AGENTS = frozenset(
    [
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
    ]
)
_ACCELERATOR = re.compile(
    r"(nvidia\.com|amd\.com|gpu\.intel\.com)/(gpu|i915|xe)|habana\.ai/gaudi|aws\.amazon\.com/neuron.*"
)
_REFERENCE = re.compile(r"\$(?:\{(\w+)\}|\((\w+)\)|(\w+))")


@dataclass(slots=True)
class Trainer:
    """A TrainingJob's pod template, and what was found with it."""

    template: dict[str, Any]
    launch: Launch | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """What the container's environment and its script set to plain values."""
    accelerators: int | None = None
    """Of one worker."""
    left: list[Note] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)

    def number(self, written: object) -> int | None:
        """Reads a whole number, perhaps of a variable; None: it is none."""
        text = unquoted(str(written).strip())
        reference = _REFERENCE.fullmatch(text)
        if reference is not None:
            text = self.variables.get(next(name for name in reference.groups() if name), "")
        return int(text) if re.fullmatch(r"\d{1,6}", text) else None


def trainer_template(template: Mapping[str, Any], names: Sequence[str], path: str) -> Trainer:
    """Makes a TrainingJob's template of a pod template, which becomes its own.

    Args:
        names: of the container that trains, the likeliest first; none of them there: the first container.
        path: where the template stands, for notes.

    Raises:
        NotConvertible: it has no container.
    """
    pod = template.get("spec")
    containers = pod.get("containers") if isinstance(pod, Mapping) else None
    if not isinstance(pod, Mapping) or not isinstance(containers, list) or not containers:
        raise NotConvertible(f"{path}.spec.containers: a template with containers is needed")
    found = Trainer({})
    kept = {key: value for key, value in (template.get("metadata") or {}).items() if key in ("labels", "annotations")}
    found.template = {**({"metadata": kept} if kept else {}), "spec": dict(pod)}
    if found.template["spec"].pop("restartPolicy", "Never") != "Never":
        found.left.append(Note(f"{path}.spec.restartPolicy", RESTARTS))
    found.left += [
        Note(f"{path}.metadata.{key}", "the operator names its pods")
        for key, value in (template.get("metadata") or {}).items()
        if key not in kept and value is not None
    ]
    named = [place for name in names for place, one in enumerate(containers) if one.get("name") == name]
    place = named[0] if named else 0
    container = {**containers[place], "name": TRAINER}
    if containers[place].get("name") not in (None, TRAINER):
        found.left.append(
            Note(f"{path}.spec.containers[{place}].name", f"the container that trains is called {TRAINER}")
        )
    others = [one for at, one in enumerate(containers) if at != place]
    found.template["spec"]["containers"] = [container, *others]
    where = f"{path}.spec.containers[{place}]"
    _environment(container, found, where)
    _accelerators(container, found)
    _command(container, found, where)
    return found


def _environment(container: dict[str, Any], found: Trainer, where: str) -> None:
    kept = []
    for place, entry in enumerate(container.get("env") or ()):
        name = str(entry.get("name", "")) if isinstance(entry, Mapping) else ""
        if name in SET_BY_AGENTS or name.startswith("PET_"):
            found.left.append(Note(dotted(("env", place), where), f"agents set {name} of each rank"))
            continue
        kept.append(entry)
        if isinstance(entry, Mapping) and isinstance(entry.get("value"), str):
            found.variables[name] = entry["value"]
    container.pop("env", None)
    if kept:
        container["env"] = kept


def _accelerators(container: Mapping[str, Any], found: Trainer) -> None:
    resources = container.get("resources") or {}
    for kind in ("limits", "requests"):
        for name, amount in (resources.get(kind) or {}).items():
            if found.accelerators is None and _ACCELERATOR.fullmatch(str(name)):
                found.accelerators = found.number(amount)


def _command(container: dict[str, Any], found: Trainer, where: str) -> None:
    command, arguments = ([str(w) for w in container.pop(key, None) or ()] for key in ("command", "args"))
    words = [*command, *arguments]
    if not command:
        found.to_do.append(
            f"{where} has no command, and the image's own is not known here: write what each rank runs in place of"
            f" {UNKNOWN_COMMAND}"
        )
        command = [UNKNOWN_COMMAND]
    else:
        try:
            command, arguments = _without_launcher(words, found) or (command, arguments)
            inside = next((word for word in words[1:] if starts_ranks(word)), None) if found.launch is None else None
            if inside is not None:
                raise NotConvertible(f"`{inside}` is started by another program: write each rank's own command")
        except NotConvertible as refused:
            found.to_do.append(f"{where}.command: {refused}")
    container["command"] = command
    if arguments:
        container["args"] = arguments


def _without_launcher(words: list[str], found: Trainer) -> tuple[list[str], list[str]] | None:
    """Command and arguments of each rank; None where the command starts no launcher."""
    script = shell_of(words)
    if script is not None:
        rewritten = without_launcher(words[script])
        found.variables |= rewritten.variables
        found.launch = rewritten.launch
        return None if rewritten.launch is None else ([*words[:script], rewritten.text, *words[script + 1 :]], [])
    found.launch = read_launch(words)
    if found.launch is None:
        return None
    program = list(found.launch.program)
    until = 1 + program.index("-m") + 1 if program[:2] == ["python", "-m"] else min(2, len(program))
    return program[:until], program[until:]
