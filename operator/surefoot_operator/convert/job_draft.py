"""Collects the fields of a TrainingJob while another system's object is read, and writes it as YAML.

Pure. The result is validated like any TrainingJob; a rejection is reported as something to do, not as an error. The parts:
the launcher's command line, the shell script around it, the pod template, the draft, its YAML and gang scheduling.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from surefoot.protocol.text import escape_control_characters
from surefoot_operator.api.parse import TRAINER, parse_job
from surefoot_operator.api.spec import API_VERSION, GANG_SCHEDULERS, KIND, SchedulingPolicy
from surefoot_operator.convert.manifest import FieldNote, ForeignManifest, NotConvertible, dotted_path
from surefoot_operator.errors import SpecError

# ---- launcher's command line -----------------------------------------------------------------------------------------
# Parses the command line of torchrun and similar launchers. In a TrainingJob the agent starts each rank; a launcher inside a
# rank would start its own process group. The options are those of torch.distributed.run in torch 2.15 and of SageMaker
# HyperPod's elastic agent.

LAUNCHERS = ("torchrun", "hyperpodrun")
MODULES = ("torch.distributed.run", "torch.distributed.launch")
OTHER_LAUNCHERS = ("accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun", "composer", "ray")
"""Launchers whose options differ from torchrun's, so that they cannot be converted."""

_FLAGS = ("standalone", "run-path", "use-env", "virtual-local-rank", "deprecated-pre-train", "inprocess-restart")
_VALUED = (
    *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "monitor-interval", "start-method", "role"),
    *("event-log-handler", "log-dir", "redirects", "tee", "local-ranks-filter", "node-rank", "master-addr"),
    *("master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout"),
    *("duplicate-stdout-filters", "duplicate-stderr-filters", "r", "t"),
    *("server-host", "server-port", "server-log-level", "server-shutdown-timeout", "pre-train-script"),
    *("pre-train-args", "post-train-script", "post-train-args", "tracer"),
)


@dataclass(frozen=True, slots=True)
class LauncherCommand:
    """The parts of a launcher's command line; empty: not given."""

    program: tuple[str, ...]
    """Command of each rank."""
    nodes: str = ""
    """Number of nodes, such as `2`, or a range, such as `1:4`."""
    ranks: str = ""
    """Number of ranks on each node, or `auto`, `gpu` or `cpu`."""
    restarts: str = ""
    """Maximum number of restarts."""
    dropped: tuple[str, ...] = ()
    """Options that a TrainingJob does not need."""


def parse_launcher_command(words: Sequence[str]) -> LauncherCommand | None:
    """Parses a command line; None if it does not start a launcher.

    Raises:
        NotConvertible: it is another system's launcher, has an unknown option, or starts no program.
    """
    name, index = _find_launcher(words)
    if not name:
        return None
    if name in OTHER_LAUNCHERS:
        raise NotConvertible(
            f"`{name}` starts the ranks, which the agent does here: write the command of one rank instead"
        )
    options: dict[str, str] = {}
    dropped: list[str] = []
    while index < len(words) and words[index].startswith("-"):
        option, equals, value = words[index].lstrip("-").partition("=")
        option, index = option.replace("_", "-"), index + 1
        if option in ("m", "module", "no-python"):
            options[option] = "yes"
            continue
        is_flag = option in _FLAGS
        if not equals and not is_flag:
            if option not in (*_VALUED, "nnodes", "nproc-per-node", "max-restarts") or index == len(words):
                raise NotConvertible(
                    f"option --{option} of {name} is unknown or has no value: write the command of one rank instead"
                )
            value, index = words[index], index + 1
        if option in ("nnodes", "nproc-per-node", "max-restarts"):
            options[option] = value
        else:
            dropped.append(f"--{option}")
    program = tuple(words[index:])
    if not program:
        raise NotConvertible(f"{name} starts no program")
    # torchrun starts scripts and modules with its own interpreter, unless --no-python is given
    if "no-python" not in options:
        program = ("python", "-m", *program) if {"m", "module"} & options.keys() else ("python", *program)
    return LauncherCommand(
        program,
        options.get("nnodes", ""),
        options.get("nproc-per-node", ""),
        options.get("max-restarts", ""),
        tuple(dropped),
    )


def is_launcher(word: str) -> bool:
    """Whether a word of a command line names torchrun or a similar launcher."""
    return PurePosixPath(word).name in LAUNCHERS or word in MODULES


def _find_launcher(words: Sequence[str]) -> tuple[str, int]:
    """Returns the launcher's name and the index of its first option; an empty name: there is none."""
    if not words:
        return "", 0
    first = PurePosixPath(words[0]).name
    if first in LAUNCHERS or first in OTHER_LAUNCHERS:
        return first, 1
    if first.startswith("python"):
        for index, word in enumerate(words[1:], 1):
            if word == "-m" and index + 1 < len(words) and words[index + 1] in MODULES:
                return words[index + 1], index + 2
            if not word.startswith("-") or word in ("-m", "-c"):
                break
    return "", 0


# ---- shell script ----------------------------------------------------------------------------------------------------
# Finds and replaces a launcher's command in a shell script. Everything else in the script stays: it may install packages or
# export variables before the program starts.

SHELLS = ("sh", "bash", "dash", "zsh", "ash")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_BEFORE = ("exec", "time", "nohup", "export", "sudo", "numactl")
_WORD = re.compile(
    r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|[<>]&|[^\s;&|\\'"`])+""",
    re.DOTALL,
)
_BETWEEN = re.compile(r"(?:[ \t]|\\\r?\n)*")
_ENDS = re.compile(r"\r?\n|;|&&|\|\||&|\|")
_COMMENT = re.compile(r"#[^\n]*")


@dataclass(frozen=True, slots=True)
class _Command:
    """The words of one command as written, with the offsets in the script at which it begins and ends."""

    words: tuple[str, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class RewrittenScript:
    """A script in which the command of one rank replaces the launcher."""

    text: str
    """The script."""
    launch: LauncherCommand | None
    """The launcher that was replaced; None: there was none."""
    variables: dict[str, str]
    """Variables that the script sets to plain values."""


def shell_script_index(words: Sequence[str]) -> int | None:
    """Returns the index of the script in `["bash", "-c", script]`; None: the command starts no shell script."""
    if not words or PurePosixPath(words[0]).name not in SHELLS:
        return None
    for index, word in enumerate(words[1:-1], 1):
        if re.fullmatch(r"-\w*c\w*", word):
            return index + 1
    return None


def replace_launcher(text: str) -> RewrittenScript:
    """Replaces the command in a script that starts a launcher.

    Raises:
        NotConvertible: there are several such commands, or one with unknown options.
    """
    variables: dict[str, str] = {}
    launches: list[tuple[_Command, int, LauncherCommand]] = []
    commands = _split_commands(text)
    for command in commands:
        # a command of nothing but assignments sets variables, which later options may use
        matches = [_ASSIGNMENT.fullmatch(word) for word in command.words if word != "export"]
        if all(matches):
            variables |= {m[1]: strip_quotes(m[2]) for m in matches if m is not None}
            continue
        # the launcher may follow `exec`, `time` or assignments for its environment
        plain = (i for i, word in enumerate(command.words) if word not in _BEFORE and not _ASSIGNMENT.fullmatch(word))
        start = next(plain, len(command.words))
        launch = parse_launcher_command(command.words[start:])
        if launch is not None:
            launches.append((command, start, launch))
    if not launches:
        return RewrittenScript(text, None, variables)
    if len(launches) > 1:
        raise NotConvertible("the script starts a launcher more than once: write the command of one rank instead")
    command, start, launch = launches[0]
    prefix = [word for word in command.words[:start] if word != "exec"]
    is_last = command is commands[-1] and not any(word in _BEFORE for word in prefix)
    # with `exec` the program replaces the shell: it gets the signals of the rank, and its exit code is the rank's
    assigned = [f"export {word};" for word in prefix] if is_last else prefix
    words = [*assigned, "exec", *launch.program] if is_last else [*prefix, *launch.program]
    return RewrittenScript(text[: command.begin] + " ".join(words) + text[command.end :], launch, variables)


def strip_quotes(word: str) -> str:
    """Removes one pair of quotes around a word."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def _split_commands(text: str) -> list[_Command]:
    """Splits a shell script into its commands, in their order. Here-documents are not supported."""
    if "<<" in text:
        raise NotConvertible(
            "the script has a here-document, which cannot be converted: write the command of one rank instead"
        )
    commands: list[_Command] = []
    words: list[str] = []
    offset = begin = end = 0
    while offset < len(text):
        offset = _BETWEEN.match(text, offset).end()  # type: ignore[union-attr]  # it also matches the empty text
        comment = _COMMENT.match(text, offset)
        if comment is not None:
            offset = comment.end()
            continue
        word = _WORD.match(text, offset)
        if word is not None:
            begin = begin if words else offset
            words.append(word[0])
            offset = end = word.end()
            continue
        if words:
            commands.append(_Command(tuple(words), begin, end))
        words = []
        ends = _ENDS.match(text, offset)
        if ends is None and offset < len(text):
            raise NotConvertible("the shell script cannot be parsed: write the command of one rank instead")
        offset = ends.end() if ends is not None else offset
    if words:
        commands.append(_Command(tuple(words), begin, end))
    return commands


# ---- trainer template ------------------------------------------------------------------------------------------------
# Converts another system's pod template. The container that trains is renamed to `trainer`, its launcher is removed, and so
# are the variables that agents set.

RESTARTS = "the operator restarts ranks, not the kubelet"
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
class TrainerTemplate:
    """A pod template of a TrainingJob, with information from the original template."""

    template: dict[str, Any]
    launch: LauncherCommand | None = None
    """The launcher that was removed from the command; None: there was none."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that the container's environment and its script set to plain values."""
    accelerators: int | None = None
    """Accelerators of one worker; None: not known."""
    skipped_fields: list[FieldNote] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)

    def resolve_integer(self, written: object) -> int | None:
        """Returns an integer, or the value of a variable that is one; None: it is neither."""
        text = strip_quotes(str(written).strip())
        reference = _REFERENCE.fullmatch(text)
        if reference is not None:
            text = self.variables.get(next(name for name in reference.groups() if name), "")
        return int(text) if re.fullmatch(r"\d{1,6}", text) else None


def build_trainer_template(template: Mapping[str, Any], names: Sequence[str], path: str) -> TrainerTemplate:
    """Converts a pod template to that of a TrainingJob.

    Args:
        names: names of the container that trains, the most likely first. If none exists, it is the first container.
        path: path of the template, for notes.

    Raises:
        NotConvertible: the template has no container.
    """
    pod = template.get("spec")
    containers = pod.get("containers") if isinstance(pod, Mapping) else None
    if not isinstance(pod, Mapping) or not isinstance(containers, list) or not containers:
        raise NotConvertible(f"{path}.spec.containers: a pod template with at least one container is needed")
    trainer = TrainerTemplate({})
    metadata = {
        key: value for key, value in (template.get("metadata") or {}).items() if key in ("labels", "annotations")
    }
    trainer.template = {**({"metadata": metadata} if metadata else {}), "spec": dict(pod)}
    if trainer.template["spec"].pop("restartPolicy", "Never") != "Never":
        trainer.skipped_fields.append(FieldNote(f"{path}.spec.restartPolicy", RESTARTS))
    trainer.skipped_fields += [
        FieldNote(f"{path}.metadata.{key}", "the operator names its pods")
        for key, value in (template.get("metadata") or {}).items()
        if key not in metadata and value is not None
    ]
    indices = [index for name in names for index, other in enumerate(containers) if other.get("name") == name]
    index = indices[0] if indices else 0
    container = {**containers[index], "name": TRAINER}
    if containers[index].get("name") not in (None, TRAINER):
        trainer.skipped_fields.append(
            FieldNote(f"{path}.spec.containers[{index}].name", f"the container that trains must be named {TRAINER}")
        )
    others = [other for i, other in enumerate(containers) if i != index]
    trainer.template["spec"]["containers"] = [container, *others]
    container_path = f"{path}.spec.containers[{index}]"
    _remove_agent_variables(container, trainer, container_path)
    _read_accelerators(container, trainer)
    _convert_command(container, trainer, container_path)
    return trainer


def _remove_agent_variables(container: dict[str, Any], trainer: TrainerTemplate, path: str) -> None:
    """Removes the variables that agents set for each rank, and records the values of the others."""
    entries = []
    for index, entry in enumerate(container.get("env") or ()):
        name = str(entry.get("name", "")) if isinstance(entry, Mapping) else ""
        if name in SET_BY_AGENTS or name.startswith("PET_"):
            trainer.skipped_fields.append(
                FieldNote(dotted_path(("env", index), path), f"agents set {name} for each rank")
            )
            continue
        entries.append(entry)
        if isinstance(entry, Mapping) and isinstance(entry.get("value"), str):
            trainer.variables[name] = entry["value"]
    container.pop("env", None)
    if entries:
        container["env"] = entries


def _read_accelerators(container: Mapping[str, Any], trainer: TrainerTemplate) -> None:
    """Records the number of accelerators that the container requests."""
    resources = container.get("resources") or {}
    for kind in ("limits", "requests"):
        for name, amount in (resources.get(kind) or {}).items():
            if trainer.accelerators is None and _ACCELERATOR.fullmatch(str(name)):
                trainer.accelerators = trainer.resolve_integer(amount)


def _convert_command(container: dict[str, Any], trainer: TrainerTemplate, path: str) -> None:
    """Replaces a launcher in the container's command by the command of one rank, or adds a task for the user."""
    command, arguments = ([str(w) for w in container.pop(key, None) or ()] for key in ("command", "args"))
    words = [*command, *arguments]
    if not command:
        trainer.to_do.append(
            f"{path} has no command, and the entrypoint of the image is unknown: replace {UNKNOWN_COMMAND} by the command of"
            " one rank"
        )
        command = [UNKNOWN_COMMAND]
    else:
        try:
            command, arguments = _remove_launcher(words, trainer) or (command, arguments)
            launcher = next((word for word in words[1:] if is_launcher(word)), None) if trainer.launch is None else None
            if launcher is not None:
                raise NotConvertible(f"another program starts `{launcher}`: write the command of one rank instead")
        except NotConvertible as error:
            trainer.to_do.append(f"{path}.command: {error}")
    container["command"] = command
    if arguments:
        container["args"] = arguments


def _remove_launcher(words: list[str], trainer: TrainerTemplate) -> tuple[list[str], list[str]] | None:
    """Returns command and arguments of one rank; None if the command starts no launcher."""
    script_index = shell_script_index(words)
    if script_index is not None:
        rewritten = replace_launcher(words[script_index])
        trainer.variables |= rewritten.variables
        trainer.launch = rewritten.launch
        return (
            None
            if rewritten.launch is None
            else ([*words[:script_index], rewritten.text, *words[script_index + 1 :]], [])
        )
    trainer.launch = parse_launcher_command(words)
    if trainer.launch is None:
        return None
    program = list(trainer.launch.program)
    command_length = 1 + program.index("-m") + 1 if program[:2] == ["python", "-m"] else min(2, len(program))
    return program[:command_length], program[command_length:]


# ---- job draft -------------------------------------------------------------------------------------------------------

ADAPT_PROGRAM = (
    "adapt the program: save and restore with surefoot.Checkpointer and read data with an elastic loader, about three lines"
    " (docs/python.md). Without them each restart begins at step 0"
)
_PLACEHOLDER = re.compile(r"\$(?:\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")
_REGENERATED = "the API server generates it"
_NOT_OURS = ("kubectl.kubernetes.io/last-applied-configuration",)
_KUEUE = "kueue.x-k8s.io/"
_QUEUE_PREFIXES = (
    _KUEUE,
    "kai.scheduler/",
    "runai/",
    "scheduling.volcano.sh/",
    "volcano.sh/",
    "yunikorn.apache.org/",
)
"""Prefixes of labels and annotations by which a queueing system finds a job. None of these systems knows TrainingJobs, but all of
them read pods."""
_FIELD_ORDER = [
    "replicas",
    "nprocPerNode",
    "spares",
    "suspend",
    "elasticPolicy",
    "runPolicy",
    "schedulingPolicy",
    "failurePolicy",
    "healthPolicy",
    "checkpoint",
    "template",
]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A TrainingJob made from another system's object, with the origin of its fields."""

    source: str
    """Kind and name of the original object."""
    job: dict[str, Any]
    """The TrainingJob."""
    used_fields: tuple[FieldNote, ...]
    """Original fields that were used, with the field that each became."""
    skipped_fields: tuple[FieldNote, ...]
    """Original fields that were left out, with the reason."""
    to_do: tuple[str, ...]
    """Tasks of the user before the job can run, a sentence each."""


@dataclass(slots=True)
class JobDraft:
    """A TrainingJob while it is collected from another system's object."""

    manifest: ForeignManifest
    """The original object."""
    metadata: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    skipped_fields: list[FieldNote] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)
    pod_metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    """Labels and annotations of the original job that queueing systems must find on the pods."""

    @property
    def is_queued_by_kueue(self) -> bool:
        """Whether the job or its pod template has a label of Kueue."""
        pod_labels = self.spec.get("template", {}).get("metadata", {}).get("labels") or {}
        return any(name.startswith(_KUEUE) for name in (*self.pod_metadata.get("labels", {}), *pod_labels))

    def set_field(self, value: object, *path: str) -> None:
        """Sets the field of the spec at `path`, unless the value is None."""
        if value is None:
            return
        mapping = self.spec
        for key in path[:-1]:
            mapping = mapping.setdefault(key, {})
        mapping[path[-1]] = value

    def copy_field(self, source: tuple[str | int, ...], *path: str, integer_only: bool = True) -> None:
        """Copies a field of the original object to the field of the spec at `path`.

        Args:
            integer_only: whether it must be an integer. Anything else, such as a placeholder, is reported as something to do.
        """
        value = self.manifest.take_field(*source, to="spec." + ".".join(path))
        if value is not None and integer_only and not isinstance(value, int):
            self.to_do.append(f"spec.{'.'.join(path)}: write a number in place of {value!s:.60}")
            return
        self.set_field(value, *path)

    def copy_metadata(self) -> None:
        """Copies name, namespace, labels and annotations; those of queueing systems go to the pods."""
        for key in ("name", "namespace"):
            value = self.manifest.take_field("metadata", key)
            if value is not None:
                self.metadata[key] = str(value)
        generated = self.manifest.peek_field("metadata", "generateName")
        if generated and "name" not in self.metadata:
            self.manifest.take_field("metadata", "generateName", to="metadata.name")
            self.metadata["name"] = str(generated).rstrip("-.")
            self.to_do.append("metadata.name: it was generated before; give the TrainingJob its own name")
        for key in ("labels", "annotations"):
            values = self.manifest.take_field("metadata", key) or {}
            self.skipped_fields += [
                FieldNote(f"metadata.{key}[{name}]", _REGENERATED) for name in values if name in _NOT_OURS
            ]
            values = {name: str(value) for name, value in values.items() if name not in _NOT_OURS}
            for_pods = {name: value for name, value in values.items() if name.startswith(_QUEUE_PREFIXES)}
            if for_pods:
                # queueing systems do not read TrainingJobs: left there, the job would run outside its quota
                self.pod_metadata[key] = for_pods
                target = f"spec.template.metadata.{key}"
                self.manifest.used_fields += [
                    FieldNote(f"metadata.{key}[{name}]", f"{target}[{name}]") for name in for_pods
                ]
            if job_values := {name: value for name, value in values.items() if name not in for_pods}:
                self.metadata[key] = job_values
        for key in ("creationTimestamp", "resourceVersion", "uid", "generation", "managedFields"):
            self.manifest.skip_field("metadata", key, why=_REGENERATED)
        self.manifest.skip_field("metadata", "generateName", why="the object has a name")

    def set_worker_counts(self, trainer: TrainerTemplate, replicas: object, ranks: object) -> None:
        """Sets the number of workers, the number of ranks in each, and the maximum number of restarts.

        Manifest and launcher may both give numbers: for workers the manifest takes precedence, for ranks the launcher.

        Args:
            replicas: number of workers in the manifest; None: not given.
            ranks: number of ranks of each worker in the manifest; None: not given.
        """
        launch = trainer.launch
        low, _, high = (launch.nodes if launch is not None else "").partition(":")
        least, most = trainer.resolve_integer(low), trainer.resolve_integer(high)
        number = trainer.resolve_integer(replicas) if replicas is not None else None
        # the launcher's number counts only if the manifest gives none; of a range, the larger
        number = number if number is not None or replicas is not None else (most or least)
        if number is None:
            number = 1
            replaced_text = f" in place of {replicas!s:.60}" if replicas is not None else ""
            self.to_do.append(f"spec.replicas: write the number of workers{replaced_text}")
        self.set_field(number, "replicas")
        if least and most and "elasticPolicy" not in self.spec:
            self.set_field({"minReplicas": least, "maxReplicas": most}, "elasticPolicy")
        self._set_ranks(trainer, ranks)
        if launch is not None:
            restarts = trainer.resolve_integer(launch.restarts)
            if restarts is not None and "maxRestarts" not in self.spec.get("failurePolicy", {}):
                self.set_field(restarts, "failurePolicy", "maxRestarts")
            if launch.dropped:
                dropped = ", ".join(launch.dropped)
                self.skipped_fields.append(
                    FieldNote(
                        "the launcher's options", f"{dropped}: agents start the ranks and give them their rendezvous"
                    )
                )

    def _set_ranks(self, trainer: TrainerTemplate, ranks: object) -> None:
        """Sets the number of ranks of each worker, or adds a task for the user."""
        if trainer.launch is None:
            # without a launcher, the command itself is the only rank of each worker
            if (trainer.accelerators or 1) > 1 or (trainer.resolve_integer(ranks) or 1) > 1:
                self.to_do.append(
                    "spec.nprocPerNode: the command started one process in each worker; usually there is one for each GPU"
                )
            return
        launcher_ranks = trainer.launch.ranks or ranks
        number = trainer.resolve_integer(launcher_ranks) if launcher_ranks else None
        # "one for each GPU", in the ways that launchers write it
        if number is None and launcher_ranks in ("", None, "auto", "gpu", *_variable(launcher_ranks)):
            number = trainer.accelerators
        if number is None and launcher_ranks:
            self.to_do.append(
                f"spec.nprocPerNode: write the number of ranks of each worker in place of {launcher_ranks!s:.60}"
            )
        if number not in (None, 1):
            self.set_field(number, "nprocPerNode")

    def use_template(self, trainer: TrainerTemplate) -> None:
        """Sets the pod template and adds its notes to the draft."""
        template = self.spec["template"] = trainer.template
        for key, values in self.pod_metadata.items():
            metadata = template.setdefault("metadata", {})
            # the template's own value wins: it is the one that the pods have had until now
            metadata[key] = {**values, **(metadata.get(key) or {})}
        if self.is_queued_by_kueue and self.spec.pop("suspend", False):
            self.skipped_fields.append(
                FieldNote(
                    "suspend",
                    "Kueue suspends whole jobs of the kinds that it knows; it admits the pods of a TrainingJob instead",
                )
            )
        self.skipped_fields += trainer.skipped_fields
        self.to_do += trainer.to_do

    def skip_volume_claims(self, manifest: ForeignManifest, *path: str | int) -> None:
        """Reports volume claims that another controller would create as left out."""
        manifest.skip_field(
            *path, "volumeClaimPolicies", why="create the claims yourself and name them in spec.template.spec.volumes"
        )

    def build_conversion(self, source: str) -> Conversion:
        """Completes the job, validates it and returns it with all notes."""
        _widen_elastic_range(self.spec)
        spec = {key: self.spec[key] for key in _FIELD_ORDER if key in self.spec}
        job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": self.metadata, "spec": spec}
        placeholders = sorted(set(_find_placeholders([job["metadata"], _without_programs(spec.get("template", {}))])))
        if placeholders:
            self.to_do.append(
                f"placeholders remain: {', '.join(placeholders)}; set them with --set NAME=VALUE or envsubst"
            )
        missing = sorted(_undeclared_volumes(spec.get("template", {})))
        if missing:
            self.to_do.append(
                f"spec.template.spec.volumes lacks {', '.join(missing)}, which volumeMounts name: no pod can start without them"
            )
        to_do = [*self.to_do, ADAPT_PROGRAM]
        # the operator would reject the job with the same message
        try:
            parse_job(job)
        except SpecError as error:
            to_do.insert(0, str(error))
        skipped_fields = (*self.skipped_fields, *self.manifest.skipped_fields, *self.manifest.unused_fields())
        return Conversion(source, job, tuple(self.manifest.used_fields), skipped_fields, tuple(dict.fromkeys(to_do)))


def _find_placeholders(tree: Any) -> Iterator[str]:
    """Yields values that are only a shell variable, which a script replaced before the file was applied."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from _find_placeholders(item)
    elif isinstance(tree, str) and _PLACEHOLDER.fullmatch(tree):
        yield tree


def _without_programs(template: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the template without commands, in which shell variables are intended."""
    pod = template.get("spec", {})
    containers = [
        {key: value for key, value in container.items() if key not in ("command", "args")}
        if isinstance(container, Mapping)
        else container
        for container in pod.get("containers", [])
    ]
    return {**template, "spec": {**pod, "containers": containers}}


def _undeclared_volumes(template: Mapping[str, Any]) -> set[str]:
    """Returns volumes that containers mount but the template lacks; another controller would add them."""
    pod = template.get("spec", {})
    declared = {str(volume.get("name")) for volume in _mappings(pod.get("volumes"))}
    containers = [*_mappings(pod.get("initContainers")), *_mappings(pod.get("containers"))]
    mounts = (mount for container in containers for mount in _mappings(container.get("volumeMounts")))
    return {str(mount.get("name")) for mount in mounts} - declared


def _mappings(items: Any) -> list[Mapping[str, Any]]:
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []


def _variable(value: object) -> tuple[object, ...]:
    """Returns a value that is a variable, for which the number of accelerators is the best guess."""
    return (value,) if str(value).lstrip("'\"").startswith("$") else ()


def _widen_elastic_range(spec: Mapping[str, Any]) -> None:
    """Widens the range of an elastic job so that it contains `replicas`."""
    elastic, replicas = spec.get("elasticPolicy"), spec.get("replicas")
    if elastic is not None and isinstance(replicas, int):
        elastic["minReplicas"] = min(elastic.get("minReplicas", replicas), replicas)
        elastic["maxReplicas"] = max(elastic.get("maxReplicas", replicas), replicas)


# ---- the TrainingJob as YAML -----------------------------------------------------------------------------------------
# Writes a conversion as YAML with comments.

WIDTH = 120
_QUOTED = re.compile(r"[-+]?\.?\d|[yYnN]$")
"""Texts that the YAML parser of Kubernetes reads as numbers or booleans while PyYAML does not, such as `1e-4`."""


def render_yaml(conversion: Conversion) -> str:
    """Writes the job as YAML, below comments with the tasks of the user, the skipped and the used fields."""
    lines = [f"# Converted from {conversion.source}."]
    for title, entries in (
        ("To do before it is applied:", list(conversion.to_do)),
        ("Left out:", list(_unused_field_lines(conversion.skipped_fields))),
        ("Taken over:", [f"{note.path} -> {note.text}" for note in conversion.used_fields]),
    ):
        if entries:
            lines += ["#", f"# {title}"]
            for entry in entries:
                lines += textwrap.wrap(
                    escape_control_characters(entry),
                    WIDTH,
                    initial_indent="#   * ",
                    subsequent_indent="#     ",
                    break_on_hyphens=False,
                )
    body = yaml.dump(conversion.job, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)
    return "\n".join(lines) + "\n" + body


class _Dumper(yaml.SafeDumper):
    """Writes scripts as block text, line by line, and never an alias, which the parser of jobs rejects."""

    def ignore_aliases(self, _: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else "'" if _QUOTED.match(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _unused_field_lines(notes: Sequence[FieldNote]) -> Iterator[str]:
    """Yields a line for each reason, with its fields in their original order."""
    by_reason: dict[str, list[str]] = {}
    for note in notes:
        by_reason.setdefault(note.text, []).append(note.path)
    for reason, paths in by_reason.items():
        yield f"{', '.join(paths)}: {reason}"


# ---- gang scheduling -------------------------------------------------------------------------------------------------
# Converts the gang scheduling of other systems. Kubeflow's operator is configured once with its gang scheduler, so a manifest
# may ask for gang scheduling without naming the scheduler. The user then has to name it; nothing is guessed.

_POLICY = ("spec", "runPolicy", "schedulingPolicy")
_SKIPPED = SchedulingPolicy.UNSUPPORTED


def convert_scheduling_policy(draft: JobDraft, scheduler_name: object) -> None:
    """Converts a Kubeflow job's `runPolicy.schedulingPolicy`, its priority class excepted.

    Args:
        scheduler_name: `schedulerName` of the pod template, by which the gang scheduler is recognized.
    """
    manifest = draft.manifest
    if manifest.peek_field(*_POLICY) is None:
        return
    gangs = [gang for gang, scheduler in GANG_SCHEDULERS.items() if scheduler.scheduler_name == scheduler_name]
    gang = next(iter(gangs), None)
    if draft.is_queued_by_kueue:
        why = "the label kueue.x-k8s.io/queue-name names the queue that admits the pods"
        manifest.skip_field(*_POLICY, "queue", why=why)
    timeout = (*_POLICY, "scheduleTimeoutSeconds")
    if gang is not None:
        draft.set_field(gang, "schedulingPolicy", "gang")
        draft.copy_field(timeout, "schedulingPolicy", "scheduleTimeoutSeconds")
    elif any(manifest.peek_field(*_POLICY, name) is not None for name in ("minAvailable", "minResources")):
        draft.to_do.append(
            "spec.schedulingPolicy: set gang to Coscheduling if the cluster has that scheduler; the manifest does not name one"
        )
    if gang is None:
        draft.copy_field(timeout, "runPolicy", "schedulingDeadlineSeconds")
    for name, why in _SKIPPED.items():
        manifest.skip_field(*_POLICY, name, why=why)


def convert_pod_group_policy(draft: JobDraft, runtime: ForeignManifest) -> None:
    """Converts the `podGroupPolicy` of a training runtime, which names its gang scheduler."""
    path = ("spec", "podGroupPolicy")
    policy: dict[str, Any] = runtime.peek_field(*path) if isinstance(runtime.peek_field(*path), dict) else {}
    runtime.skip_field(*path, "volcano", why="Coscheduling is the only supported gang scheduler")
    if "coscheduling" in policy:
        draft.set_field("Coscheduling", "schedulingPolicy", "gang")
        seconds = runtime.take_field(
            *path, "coscheduling", "scheduleTimeoutSeconds", to="spec.schedulingPolicy.scheduleTimeoutSeconds"
        )
        draft.set_field(seconds, "schedulingPolicy", "scheduleTimeoutSeconds")
        runtime.take_field(*path, "coscheduling", to="spec.schedulingPolicy.gang")
