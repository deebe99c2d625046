"""`python -m images build`: both images, looked into (build/images.json). `exec -- COMMAND`: a command with that docker.

With the docker that answers, else, as root on Debian, with one of its own that ends with this program.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from images import build, daemon, plan, report
from images.docker import Docker, observe
from images.errors import ImagesError
from images.recipes import RECIPES, build_arguments


def main(words: list[str]) -> int:
    options = _options(words)
    signal.signal(signal.SIGTERM, _end)
    machine = observe()
    try:
        chosen = plan.daemon(machine)
        _say(chosen.reason)
        with daemon.docker(chosen, daemon.cache_folder()) as docker:
            if options.verb == "exec":
                return subprocess.run(options.command, env=docker.environment, check=False).returncode
            return _build(options, machine, chosen, docker)
    except ImagesError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1


def _build(options: argparse.Namespace, machine: plan.Machine, chosen: plan.Daemon, docker: Docker) -> int:
    base, name = build.find_base(docker, options.base, machine, _say)
    release = build.release(options.prefix, options.source)
    wanted = [recipe for recipe in RECIPES if options.only in (None, recipe.name)]
    images = build.rows_of_others(docker, options.json, [release.tag(recipe) for recipe in wanted])
    for recipe in wanted:
        _say(f"building {release.tag(recipe)}")
        arguments = build_arguments(recipe, release, name, docker.can_bridge, options.extra_index)
        seconds = build.build(docker, recipe, arguments)
        row = build.look_into(docker, recipe, release, options.json.parent)
        images[release.tag(recipe)] = {**row, "build_seconds": round(seconds, 1)}
        _say(report.line(release.tag(recipe), images[release.tag(recipe)]))
    if chosen.kind == "own":
        build.forget_older(docker)
    build.write(
        options.json,
        {
            "docker": {
                "version": docker.run("version", "--format", "{{.Server.Version}}").strip(),
                "why": chosen.reason,
            },
            "base": {"image": name, "made": base.is_made, "why": base.reason},
            "images": images,
        },
    )
    wrong = [
        f"{tag}: {sentence}"
        for tag, image in images.items()
        for sentence in report.Findings(**image["findings"]).sentences()
    ]
    for sentence in wrong[:50]:
        print(f"images: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m images", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    made = verbs.add_parser("build", help="build the images, look into them, write what is in them")
    made.add_argument("--prefix", default="surefoot/", help="in front of `operator` and `runtime` in the images' names")
    made.add_argument("--base", default=plan.NAMED_BASE, help="what both stand on")
    made.add_argument("--extra-index", default="", help="of packages, such as PyTorch's of builds for CPUs")
    made.add_argument("--source", default="unknown", help="where the source is, for the label of that name")
    made.add_argument("--only", choices=[recipe.name for recipe in RECIPES])
    made.add_argument("--json", type=Path, default=Path("build/images.json"))
    given = verbs.add_parser("exec", help="run a command with DOCKER_HOST, such as `exec -- docker push NAME`")
    given.add_argument("command", nargs="+")
    return parser.parse_args(words)


def _say(sentence: str) -> None:
    print(sentence, flush=True)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
