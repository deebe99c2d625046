"""Gathers a TrainingJob while another system's object is read.

Pure. Checked at the end as the operator would check it; what is then refused is a thing to do, not an error.
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
from surefoot_operator.convert.manifest import FieldNote, Manifest, NotConvertible, dotted
from surefoot_operator.errors import SpecError

# ---- launcher's command line -----------------------------------------------------------------------------------------
# Reads the command line of torchrun and its like. In a TrainingJob the agent starts each rank; a launcher inside of a
# rank would start a world of its own. Options are those of torch.distributed.run of torch 2.15 and of SageMaker
# HyperPod's elastic agent.

LAUNCHERS = ("torchrun", "hyperpodrun")
MODULES = ("torch.distributed.run", "torch.distributed.launch")
OTHERS = ("accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun", "composer", "ray")
"""Launchers whose options are no torchrun's."""

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
    """What a launcher's command line says; empty where it says nothing."""

    program: tuple[str, ...]
    """Each rank's command."""
    nodes: str = ""
    """`2`, or `1:4`."""
    ranks: str = ""
    """A number of each node, or `auto`, `gpu`, `cpu`."""
    restarts: str = ""
    dropped: tuple[str, ...] = ()
    """Options that a TrainingJob has no use for."""


def read_launch(words: Sequence[str]) -> LauncherCommand | None:
    """Reads a command line; None where it starts no launcher.

    Raises:
        NotConvertible: another system's launcher, an option that is not known, or no program.
    """
    name, at = _launcher(words)
    if not name:
        return None
    if name in OTHERS:
        raise NotConvertible(f"`{name}` starts the ranks: write each rank's own command; the agent starts the ranks")
    known: dict[str, str] = {}
    dropped: list[str] = []
    while at < len(words) and words[at].startswith("-"):
        option, equals, value = words[at].lstrip("-").partition("=")
        option, at = option.replace("_", "-"), at + 1
        if option in ("m", "module", "no-python"):
            known[option] = "yes"
            continue
        flag = option in _FLAGS
        if not equals and not flag:
            if option not in (*_VALUED, "nnodes", "nproc-per-node", "max-restarts") or at == len(words):
                raise NotConvertible(f"{name} has no option --{option} that is known here: write each rank's command")
            value, at = words[at], at + 1
        if option in ("nnodes", "nproc-per-node", "max-restarts"):
            known[option] = value
        else:
            dropped.append(f"--{option}")
    program = tuple(words[at:])
    if not program:
        raise NotConvertible(f"{name} starts no program")
    if "no-python" not in known:
        program = ("python", "-m", *program) if {"m", "module"} & known.keys() else ("python", *program)
    return LauncherCommand(
        program, known.get("nnodes", ""), known.get("nproc-per-node", ""), known.get("max-restarts", ""), tuple(dropped)
    )


def starts_ranks(word: str) -> bool:
    """Whether a word of a command line names a launcher of torch."""
    return PurePosixPath(word).name in LAUNCHERS or word in MODULES


def _launcher(words: Sequence[str]) -> tuple[str, int]:
    """Its name, and where its options begin; empty where there is none."""
    if not words:
        return "", 0
    first = PurePosixPath(words[0]).name
    if first in LAUNCHERS or first in OTHERS:
        return first, 1
    if first.startswith("python"):
        for at, word in enumerate(words[1:], 1):
            if word == "-m" and at + 1 < len(words) and words[at + 1] in MODULES:
                return words[at + 1], at + 2
            if not word.startswith("-") or word in ("-m", "-c"):
                break
    return "", 0


# ---- shell script ----------------------------------------------------------------------------------------------------
# Finds and replaces a launcher's command in a shell script. Scripts keep everything else: what they install, export and
# print stands before the program as it did.

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
    """Words of one command, as they stand in the script, and where it begins and ends."""

    words: tuple[str, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class RewrittenScript:
    """A script whose launcher is replaced by each rank's own command."""

    text: str
    launch: LauncherCommand | None
    variables: dict[str, str]
    """What it sets to plain values."""


def shell_of(words: Sequence[str]) -> int | None:
    """Where the script stands in `["bash", "-c", script]`; None: it is no shell's command."""
    if not words or PurePosixPath(words[0]).name not in SHELLS:
        return None
    for at, word in enumerate(words[1:-1], 1):
        if re.fullmatch(r"-\w*c\w*", word):
            return at + 1
    return None


def without_launcher(text: str) -> RewrittenScript:
    """Replaces the one command that starts a launcher.

    Raises:
        NotConvertible: there are two of them, or one whose options are not known.
    """
    variables: dict[str, str] = {}
    found: list[tuple[_Command, int, LauncherCommand]] = []
    commands = _commands(text)
    for command in commands:
        matches = [_ASSIGNMENT.fullmatch(word) for word in command.words if word != "export"]
        if all(matches):
            variables |= {m[1]: unquoted(m[2]) for m in matches if m is not None}
            continue
        plain = (i for i, word in enumerate(command.words) if word not in _BEFORE and not _ASSIGNMENT.fullmatch(word))
        first = next(plain, len(command.words))
        launch = read_launch(command.words[first:])
        if launch is not None:
            found.append((command, first, launch))
    if not found:
        return RewrittenScript(text, None, variables)
    if len(found) > 1:
        raise NotConvertible("the script starts a launcher more than once: write each rank's own command")
    command, first, launch = found[0]
    before = [word for word in command.words[:first] if word != "exec"]
    last = command is commands[-1] and not any(word in _BEFORE for word in before)
    # behind `exec` the program is the rank: signals reach it, and its exit code is the rank's
    assigned = [f"export {word};" for word in before] if last else before
    words = [*assigned, "exec", *launch.program] if last else [*before, *launch.program]
    return RewrittenScript(text[: command.begin] + " ".join(words) + text[command.end :], launch, variables)


def unquoted(word: str) -> str:
    """Takes the quotes off a word that has one pair around it."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def _commands(text: str) -> list[_Command]:
    """Its commands in their order. Here-documents are not understood."""
    if "<<" in text:
        raise NotConvertible("the script has a here-document: write each rank's own command")
    found: list[_Command] = []
    words: list[str] = []
    at = begin = end = 0
    while at < len(text):
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing too
        comment = _COMMENT.match(text, at)
        if comment is not None:
            at = comment.end()
            continue
        word = _WORD.match(text, at)
        if word is not None:
            begin = begin if words else at
            words.append(word[0])
            at = end = word.end()
            continue
        if words:
            found.append(_Command(tuple(words), begin, end))
        words = []
        ends = _ENDS.match(text, at)
        if ends is None and at < len(text):
            raise NotConvertible("the shell script is not understood: write each rank's own command")
        at = ends.end() if ends is not None else at
    if words:
        found.append(_Command(tuple(words), begin, end))
    return found


# ---- trainer template ------------------------------------------------------------------------------------------------
# Turns another system's pod template into a TrainingJob's. The container that trains is named `trainer`, its launcher
# is taken out, and what agents set is not set twice.

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
class TrainerTemplate:
    """A TrainingJob's pod template, and what was found with it."""

    template: dict[str, Any]
    launch: LauncherCommand | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """What the container's environment and its script set to plain values."""
    accelerators: int | None = None
    """Of one worker."""
    skipped_fields: list[FieldNote] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)

    def number(self, written: object) -> int | None:
        """Reads a whole number, perhaps of a variable; None: it is none."""
        text = unquoted(str(written).strip())
        reference = _REFERENCE.fullmatch(text)
        if reference is not None:
            text = self.variables.get(next(name for name in reference.groups() if name), "")
        return int(text) if re.fullmatch(r"\d{1,6}", text) else None


def trainer_template(template: Mapping[str, Any], names: Sequence[str], path: str) -> TrainerTemplate:
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
    found = TrainerTemplate({})
    kept = {key: value for key, value in (template.get("metadata") or {}).items() if key in ("labels", "annotations")}
    found.template = {**({"metadata": kept} if kept else {}), "spec": dict(pod)}
    if found.template["spec"].pop("restartPolicy", "Never") != "Never":
        found.skipped_fields.append(FieldNote(f"{path}.spec.restartPolicy", RESTARTS))
    found.skipped_fields += [
        FieldNote(f"{path}.metadata.{key}", "the operator names its pods")
        for key, value in (template.get("metadata") or {}).items()
        if key not in kept and value is not None
    ]
    named = [place for name in names for place, one in enumerate(containers) if one.get("name") == name]
    place = named[0] if named else 0
    container = {**containers[place], "name": TRAINER}
    if containers[place].get("name") not in (None, TRAINER):
        found.skipped_fields.append(
            FieldNote(f"{path}.spec.containers[{place}].name", f"the container that trains is called {TRAINER}")
        )
    others = [one for at, one in enumerate(containers) if at != place]
    found.template["spec"]["containers"] = [container, *others]
    where = f"{path}.spec.containers[{place}]"
    _environment(container, found, where)
    _accelerators(container, found)
    _command(container, found, where)
    return found


def _environment(container: dict[str, Any], found: TrainerTemplate, where: str) -> None:
    kept = []
    for place, entry in enumerate(container.get("env") or ()):
        name = str(entry.get("name", "")) if isinstance(entry, Mapping) else ""
        if name in SET_BY_AGENTS or name.startswith("PET_"):
            found.skipped_fields.append(FieldNote(dotted(("env", place), where), f"agents set {name} of each rank"))
            continue
        kept.append(entry)
        if isinstance(entry, Mapping) and isinstance(entry.get("value"), str):
            found.variables[name] = entry["value"]
    container.pop("env", None)
    if kept:
        container["env"] = kept


def _accelerators(container: Mapping[str, Any], found: TrainerTemplate) -> None:
    resources = container.get("resources") or {}
    for kind in ("limits", "requests"):
        for name, amount in (resources.get(kind) or {}).items():
            if found.accelerators is None and _ACCELERATOR.fullmatch(str(name)):
                found.accelerators = found.number(amount)


def _command(container: dict[str, Any], found: TrainerTemplate, where: str) -> None:
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


def _without_launcher(words: list[str], found: TrainerTemplate) -> tuple[list[str], list[str]] | None:
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


# ---- job draft -------------------------------------------------------------------------------------------------------

THE_PROGRAM = (
    "the program saves and restores with surefoot.Checkpointer and reads its data elastically, some three lines:"
    " docs/python.md. Without them each restart begins at step 0"
)
_PLACEHOLDER = re.compile(r"\$(?:\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")
_REGENERATED = "the API server writes it anew"
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
"""Labels and annotations by which a queueing system finds a job. None of these systems knows a TrainingJob; all read pods."""
_ORDER = [
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
    """A TrainingJob, its fields' sources, and what a person does first."""

    source: str
    job: dict[str, Any]
    used_fields: tuple[FieldNote, ...]
    skipped_fields: tuple[FieldNote, ...]
    to_do: tuple[str, ...]


@dataclass(slots=True)
class Draft:
    """What is known of the job so far."""

    manifest: Manifest
    metadata: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    skipped_fields: list[FieldNote] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)
    pod_metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    """Labels and annotations of the job that queueing systems have to find on its pods."""

    @property
    def is_queued_by_kueue(self) -> bool:
        """Whether the job, or its pod template, names a queue of Kueue."""
        pod_labels = self.spec.get("template", {}).get("metadata", {}).get("labels") or {}
        return any(name.startswith(_KUEUE) for name in (*self.pod_metadata.get("labels", {}), *pod_labels))

    def put(self, value: object, *path: str) -> None:
        """Writes a field of the spec that has a value."""
        if value is None:
            return
        at = self.spec
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value

    def copy_field(self, source: tuple[str | int, ...], *path: str, whole: bool = True) -> None:
        """Takes a field over as it is.

        One that shall be a number and is none, as a placeholder is, becomes a thing to do.
        """
        value = self.manifest.take(*source, to="spec." + ".".join(path))
        if value is not None and whole and not isinstance(value, int):
            self.to_do.append(f"spec.{'.'.join(path)}: a number, where {value!s:.60} stood")
            return
        self.put(value, *path)

    def describe(self) -> None:
        """Takes over name, namespace, labels and annotations."""
        for key in ("name", "namespace"):
            value = self.manifest.take("metadata", key)
            if value is not None:
                self.metadata[key] = str(value)
        generated = self.manifest.peek("metadata", "generateName")
        if generated and "name" not in self.metadata:
            self.manifest.take("metadata", "generateName", to="metadata.name")
            self.metadata["name"] = str(generated).rstrip("-.")
            self.to_do.append("metadata.name: it was generated; a TrainingJob's name is its own")
        for key in ("labels", "annotations"):
            kept = self.manifest.take("metadata", key) or {}
            self.skipped_fields += [
                FieldNote(f"metadata.{key}[{name}]", _REGENERATED) for name in kept if name in _NOT_OURS
            ]
            kept = {name: str(value) for name, value in kept.items() if name not in _NOT_OURS}
            for_pods = {name: value for name, value in kept.items() if name.startswith(_QUEUE_PREFIXES)}
            if for_pods:
                # on a TrainingJob the queue would not see them, and the job would run past its quota
                self.pod_metadata[key] = for_pods
                target = f"spec.template.metadata.{key}"
                self.manifest.used_fields += [
                    FieldNote(f"metadata.{key}[{name}]", f"{target}[{name}]") for name in for_pods
                ]
            if own := {name: value for name, value in kept.items() if name not in for_pods}:
                self.metadata[key] = own
        for key in ("creationTimestamp", "resourceVersion", "uid", "generation", "managedFields"):
            self.manifest.skip("metadata", key, why=_REGENERATED)
        self.manifest.skip("metadata", "generateName", why="the object has a name")

    def size(self, trainer: TrainerTemplate, replicas: object, ranks: object) -> None:
        """Settles the number of workers, and of ranks in each.

        Manifest and launcher may both say something; the manifest's workers and the launcher's ranks go first.
        """
        launch = trainer.launch
        low, _, high = (launch.nodes if launch is not None else "").partition(":")
        least, most = trainer.number(low), trainer.number(high)
        number = trainer.number(replicas) if replicas is not None else None
        number = number if number is not None or replicas is not None else (most or least)
        if number is None:
            number = 1
            said = f", where {replicas!s:.60} stood" if replicas is not None else ""
            self.to_do.append(f"spec.replicas: how many workers{said}")
        self.put(number, "replicas")
        if least and most and "elasticPolicy" not in self.spec:
            self.put({"minReplicas": least, "maxReplicas": most}, "elasticPolicy")
        self._ranks(trainer, ranks)
        if launch is not None:
            restarts = trainer.number(launch.restarts)
            if restarts is not None and "maxRestarts" not in self.spec.get("failurePolicy", {}):
                self.put(restarts, "failurePolicy", "maxRestarts")
            if launch.dropped:
                dropped = ", ".join(launch.dropped)
                self.skipped_fields.append(
                    FieldNote(
                        "the launcher's options", f"{dropped}: agents start the ranks and give them their rendezvous"
                    )
                )

    def _ranks(self, trainer: TrainerTemplate, ranks: object) -> None:
        if trainer.launch is None:
            if (trainer.accelerators or 1) > 1 or (trainer.number(ranks) or 1) > 1:
                self.to_do.append(
                    "spec.nprocPerNode: the command started one process a worker; one for each GPU is usual"
                )
            return
        said = trainer.launch.ranks or ranks
        number = trainer.number(said) if said else None
        if number is None and said in ("", None, "auto", "gpu", *_variable(said)):
            number = trainer.accelerators
        if number is None and said:
            self.to_do.append(f"spec.nprocPerNode: how many ranks a worker has, where {said!s:.60} stood")
        if number not in (None, 1):
            self.put(number, "nprocPerNode")

    def accept(self, trainer: TrainerTemplate) -> None:
        """Takes the template, and what was found out with it."""
        template = self.spec["template"] = trainer.template
        for key, values in self.pod_metadata.items():
            metadata = template.setdefault("metadata", {})
            # the template's own value is what its pods carried until now
            metadata[key] = {**values, **(metadata.get(key) or {})}
        if self.is_queued_by_kueue and self.spec.pop("suspend", False):
            self.skipped_fields.append(
                FieldNote("suspend", "Kueue suspends jobs of other kinds; here it admits each pod")
            )
        self.skipped_fields += trainer.skipped_fields
        self.to_do += trainer.to_do

    def claims(self, manifest: Manifest, *path: str | int) -> None:
        """Reports claims that another controller made and mounted by name."""
        manifest.skip(*path, "volumeClaimPolicies", why="make the claims, and name them in spec.template.spec.volumes")

    def build(self, source: str) -> Conversion:
        """The job as it would be applied."""
        _within(self.spec)
        spec = {key: self.spec[key] for key in _ORDER if key in self.spec}
        job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": self.metadata, "spec": spec}
        placeholders = sorted(set(_placeholders([job["metadata"], _without_programs(spec.get("template", {}))])))
        if placeholders:
            self.to_do.append(
                f"placeholders are left: {', '.join(placeholders)}; --set NAME=VALUE, or envsubst, fills them"
            )
        missing = sorted(_undeclared_volumes(spec.get("template", {})))
        if missing:
            self.to_do.append(
                f"spec.template.spec.volumes lacks {', '.join(missing)}, which volumeMounts name: no pod begins without"
            )
        to_do = [*self.to_do, THE_PROGRAM]
        try:
            parse_job(job)
        except SpecError as refused:
            to_do.insert(0, str(refused))
        left = (*self.skipped_fields, *self.manifest.skipped_fields, *self.manifest.unused_fields())
        return Conversion(source, job, tuple(self.manifest.used_fields), left, tuple(dict.fromkeys(to_do)))


def _placeholders(tree: Any) -> Iterator[str]:
    """Values that are nothing but a shell's variable: whoever applied the file put something in their place."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from _placeholders(item)
    elif isinstance(tree, str) and _PLACEHOLDER.fullmatch(tree):
        yield tree


def _without_programs(template: Mapping[str, Any]) -> dict[str, Any]:
    """The template without commands, in which a shell's variables are meant."""
    pod = template.get("spec", {})
    containers = [
        {key: value for key, value in one.items() if key not in ("command", "args")}
        if isinstance(one, Mapping)
        else one
        for one in pod.get("containers", [])
    ]
    return {**template, "spec": {**pod, "containers": containers}}


def _undeclared_volumes(template: Mapping[str, Any]) -> set[str]:
    """Volumes that containers mount and the template has not: their claims were made from elsewhere."""
    pod = template.get("spec", {})
    there = {str(one.get("name")) for one in _mappings(pod.get("volumes"))}
    containers = [*_mappings(pod.get("initContainers")), *_mappings(pod.get("containers"))]
    return {str(one.get("name")) for each in containers for one in _mappings(each.get("volumeMounts"))} - there


def _mappings(items: Any) -> list[Mapping[str, Any]]:
    return [one for one in items if isinstance(one, Mapping)] if isinstance(items, list) else []


def _variable(said: object) -> tuple[object, ...]:
    """What is written, where it is a variable that nothing here sets: the accelerators are as good a guess."""
    return (said,) if str(said).lstrip("'\"").startswith("$") else ()


def _within(spec: Mapping[str, Any]) -> None:
    """Widens the sizes of an elastic job to the one it begins with."""
    elastic, replicas = spec.get("elasticPolicy"), spec.get("replicas")
    if elastic is not None and isinstance(replicas, int):
        elastic["minReplicas"] = min(elastic.get("minReplicas", replicas), replicas)
        elastic["maxReplicas"] = max(elastic.get("maxReplicas", replicas), replicas)


# ---- the TrainingJob as YAML -----------------------------------------------------------------------------------------
# Writes a conversion as YAML with comments.

WIDTH = 120
_QUOTED = re.compile(r"[-+]?\.?\d|[yYnN]$")
"""Texts that Kubernetes' reader of YAML takes for numbers or truth values where PyYAML's does not: `1e-4`."""


def rendered(conversion: Conversion) -> str:
    """Renders the job, with what became of each field above it."""
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
    """Writes scripts as people do, line by line, and never an alias, which no reader of ours takes."""

    def ignore_aliases(self, _: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else "'" if _QUOTED.match(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _unused_field_lines(notes: Sequence[FieldNote]) -> Iterator[str]:
    """One line for each reason, its fields in the order in which they stand."""
    by_reason: dict[str, list[str]] = {}
    for note in notes:
        by_reason.setdefault(note.text, []).append(note.path)
    for reason, paths in by_reason.items():
        yield f"{', '.join(paths)}: {reason}"


# ---- gang scheduling -------------------------------------------------------------------------------------------------
# Converts how other systems have a job's pods placed together. Kubeflow's operator is told once which gang scheduler it
# serves, so a manifest may ask for a gang without a word of whose: then a person has to say it, and nothing is guessed.

_POLICY = ("spec", "runPolicy", "schedulingPolicy")
_LEFT = SchedulingPolicy.UNSUPPORTED


def gang_of_run_policy(draft: Draft, scheduler_name: object) -> None:
    """Converts a Kubeflow job's `runPolicy.schedulingPolicy`, its priority class excepted.

    Args:
        scheduler_name: what the pods' template says; it tells whose gang it is.
    """
    manifest = draft.manifest
    if manifest.peek(*_POLICY) is None:
        return
    named = [gang for gang, one in GANG_SCHEDULERS.items() if one.scheduler_name == scheduler_name]
    gang = next(iter(named), None)
    if draft.is_queued_by_kueue:
        why = "the label kueue.x-k8s.io/queue-name names the queue that admits the pods"
        manifest.skip(*_POLICY, "queue", why=why)
    timeout = (*_POLICY, "scheduleTimeoutSeconds")
    if gang is not None:
        draft.put(gang, "schedulingPolicy", "gang")
        draft.copy_field(timeout, "schedulingPolicy", "scheduleTimeoutSeconds")
    elif any(manifest.peek(*_POLICY, name) is not None for name in ("minAvailable", "minResources")):
        draft.to_do.append(
            "spec.schedulingPolicy: name the gang scheduler, Coscheduling, if the cluster has it; nothing here says so"
        )
    if gang is None:
        draft.copy_field(timeout, "runPolicy", "schedulingDeadlineSeconds")
    for name, why in _LEFT.items():
        manifest.skip(*_POLICY, name, why=why)


def gang_of_runtime(draft: Draft, runtime: Manifest) -> None:
    """Converts a training runtime's `podGroupPolicy`, which names its scheduler."""
    path = ("spec", "podGroupPolicy")
    named: dict[str, Any] = runtime.peek(*path) if isinstance(runtime.peek(*path), dict) else {}
    runtime.skip(*path, "volcano", why="of gang schedulers Coscheduling alone is supported")
    if "coscheduling" in named:
        draft.put("Coscheduling", "schedulingPolicy", "gang")
        seconds = runtime.take(
            *path, "coscheduling", "scheduleTimeoutSeconds", to="spec.schedulingPolicy.scheduleTimeoutSeconds"
        )
        draft.put(seconds, "schedulingPolicy", "scheduleTimeoutSeconds")
        runtime.take(*path, "coscheduling", to="spec.schedulingPolicy.gang")
