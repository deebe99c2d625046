"""Implements `surefoot init`, `validate` and `convert`, and reads job files for other commands.

Called by `main`. `validate` checks a job and lists the fields that `surefoot local` ignores.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from surefoot_operator.api.loading import load_documents, load_yaml
from surefoot_operator.api.mistakes import list_mistakes
from surefoot_operator.api.parse import MAX_DOCUMENT_CHARACTERS, parse_job
from surefoot_operator.api.spec import API_VERSION, KIND, TrainingJob, allowed_sizes
from surefoot_operator.cli.command_base import EXIT_OK, UsageError, say, warn
from surefoot_operator.convert.conversion import KINDS, KNOWN, convert_command, convert_documents
from surefoot_operator.convert.job_draft import parse_launcher_command, render_yaml
from surefoot_operator.convert.manifest import NotConvertible
from surefoot_operator.errors import SpecError


def add_file(parser: Any, help_text: str = "the TrainingJob; - reads standard input", required: bool = False) -> None:
    """Adds `-f` to a parser or to a group of one."""
    parser.add_argument("-f", "--file", type=Path, required=required, metavar="JOB.yaml", help=help_text)


def add_validate_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser, required=True)


def run_validate(args: argparse.Namespace) -> int:
    # It imports the whole local platform, which no other command of this module needs.
    from surefoot_operator.platforms.local.platform import list_ignored_fields

    job = read_job(args.file)
    sizes = ", ".join(map(str, allowed_sizes(job.spec)))
    say(f"{args.file} is valid: {job.name}, worlds of {sizes} workers × {job.spec.nproc_per_node} ranks")
    for name in list_ignored_fields(job.spec):
        say(f"`surefoot local` ignores: {name}")
    return EXIT_OK


def read_job(path: Path) -> TrainingJob:
    """Reads and checks the job in a file. Raises UsageError if it cannot be read or is invalid."""
    return read_document(path)[1]


def read_document(path: Path) -> tuple[dict[str, Any], TrainingJob]:
    """Reads a job's file; returns the document and the job parsed from it.

    Raises:
        UsageError: The file cannot be read or is invalid. The message has all mistakes, each with its line.
    """
    content = _read_text(path)
    try:
        document = load_yaml(content)
    except SpecError as error:
        raise UsageError(f"{path}: {error}") from error
    try:
        return document, parse_job(document)
    except SpecError as error:
        group, kind = str(document.get("apiVersion")).partition("/")[0], str(document.get("kind"))
        if (group, kind) in KINDS:
            raise UsageError(
                f"{path} is a {kind}: surefoot convert -f {path} makes a TrainingJob of it, also in a pipe:"
                f" surefoot convert -f {path} | surefoot validate -f -"
            ) from error
        mistakes = list_mistakes(content, document) or [str(error)]
        if len(mistakes) == 1:
            raise UsageError(f"{path}: {mistakes[0]}") from error
        raise UsageError("\n  ".join([f"{path} has {len(mistakes)} mistakes:", *mistakes])) from error


def _read_text(path: Path) -> str:
    """Reads a file, or standard input for `-`, limited because the path may be /dev/zero. Raises UsageError."""
    try:
        if str(path) == "-":
            content = sys.stdin.buffer.read(4 * MAX_DOCUMENT_CHARACTERS + 1)
        else:
            with open(path, "rb") as file:
                content = file.read(4 * MAX_DOCUMENT_CHARACTERS + 1)
        return content.decode("utf-8", "strict" if len(content) <= 4 * MAX_DOCUMENT_CHARACTERS else "replace")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


# ---- init ------------------------------------------------------------------------------------------------------------
# Implements `surefoot init`: writes a commented job.yaml, and an example train.py if no program is named and none is there.


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command_line", nargs="*", metavar="-- COMMAND", help="the program (default: python train.py)")
    parser.add_argument("--to", type=Path, default=Path("job.yaml"), metavar="FILE", help="default: job.yaml")


def run_init(args: argparse.Namespace) -> int:
    """Writes the files; existing ones are never replaced. Raises UsageError."""
    files = resources.files("surefoot_operator.cli") / "examples"
    job = (files / "job.yaml").read_text(encoding="utf-8")
    if args.command_line:
        document = job_of_command(args.command_line, 3)
        [trainer] = document["spec"]["template"]["spec"]["containers"]
        command = json.dumps([*trainer["command"], *trainer.get("args", ())])
        job = re.sub(r"metadata: .*", f"metadata: {{name: {document['metadata']['name']}}}", job)
        job = job.replace("[python, train.py]", command)
        job = job.replace("nprocPerNode: 1", f"nprocPerNode: {document['spec'].get('nprocPerNode', 1)}")
    contents = {args.to: job}
    if not args.command_line and not Path("train.py").exists():
        contents[Path("train.py")] = (files / "train.py.txt").read_text(encoding="utf-8")
    for path, content in contents.items():
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(content)
        except FileExistsError:
            raise UsageError(f"{path} exists and is not replaced: remove it, or give --to FILE") from None
        say(f"wrote {path}")
    say(f"next: surefoot local -f {args.to} --fault node:1@step=50,for=3")
    return EXIT_OK


def job_of_command(words: Sequence[str], nodes: int) -> dict[str, Any]:
    """Builds the TrainingJob that runs a program on `nodes` nodes. Raises UsageError.

    The launcher of a torchrun command is left out, because agents start the ranks.
    """
    try:
        job = convert_command(words).job if parse_launcher_command(words) is not None else None
    except NotConvertible as error:
        raise UsageError(f"the command line: {error}") from error
    spec: dict[str, Any] = {
        "replicas": nodes,
        "elasticPolicy": {"minReplicas": 1, "maxReplicas": nodes},
        "template": {"spec": {"containers": [{"name": "trainer", "command": list(words)}]}},
    }
    if job is not None:
        spec |= {name: job["spec"][name] for name in ("nprocPerNode", "template") if name in job["spec"]}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": _job_name(words)}, "spec": spec}


def _job_name(words: Sequence[str]) -> str:
    """Returns the name of a job that runs this command: that of its script."""
    script = next((word for word in reversed(words) if word.endswith(".py")), words[0])
    return re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-0123456789")[:52].rstrip("-") or "training"


# ---- convert ---------------------------------------------------------------------------------------------------------
# Implements `surefoot convert`: prints another system's training job as a TrainingJob with comments.


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    add_file(source, f"{KNOWN}; - reads standard input")
    source.add_argument("command_line", nargs="*", default=[], metavar="-- torchrun …", help="a torchrun command line")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of $NAME in the file, as for envsubst",
    )


def run_convert(args: argparse.Namespace) -> int:
    try:
        if args.file is None:
            conversions, others = [convert_command(args.command_line)], list[str]()
        else:
            conversions, others = convert_documents(
                load_documents(_substitute_variables(_read_text(args.file), args.set))
            )
    except (NotConvertible, SpecError) as error:
        raise UsageError(f"{args.file or 'the command line'}: {error}") from error
    sys.stdout.write("---\n".join(render_yaml(conversion) for conversion in conversions))
    sys.stdout.flush()
    for conversion in conversions:
        warn(
            f"{conversion.source}: {len(conversion.used_fields)} fields taken over, {len(conversion.skipped_fields)} left out, {len(conversion.to_do)} things to do"
        )
    if others:
        warn(f"not converted: {', '.join(others)}")
    return EXIT_OK


def _substitute_variables(content: str, settings: list[str]) -> str:
    """Replaces `$NAME` and `${NAME}` by the values of `--set NAME=VALUE`. Raises UsageError."""
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UsageError(f"--set {setting!s:.60}: NAME=VALUE is needed")
        content = re.sub(rf"\$\{{{name}\}}|\${name}\b", lambda _, v=value: v, content)  # type: ignore[misc]
    return content
