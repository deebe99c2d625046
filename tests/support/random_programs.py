"""Random programs of a few modules that note what they can observe, started by the interpreter and by the fork server.

Their packages are installed in a virtual environment of their own that has nothing else but Surefoot.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.launcher import starter as starter_module
from surefoot.launcher.starter import Starter

NOTING = '''
"""Collects what a program's modules observe."""
import atexit, builtins, json, os, random, signal, sys, threading
notes = builtins.notes = []
def note(*what):
    notes.append([sys._getframe(1).f_globals["__name__"], *map(repr, what)])
def report(names, main):
    spec = main.get("__spec__")
    handlers = [getattr(h, "__name__", repr(h)) for h in map(signal.getsignal, (15, 2, 17, 10, 1))]
    print(json.dumps({
        "notes": notes, "argv": sys.argv, "original": sys.orig_argv, "environment": dict(os.environ), "folder": os.getcwd(),
        "bytes": sorted(map(repr, os.environb.items())), "types": [type(os.environ).__name__, type(sys.argv).__name__],
        "data": type(os.environ._data).__name__, "path": sys.path, "handlers": handlers,
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "threads": sorted(t.name for t in threading.enumerate()), "modules": [m for m in sys.modules if m.split(".")[0] in names],
        "main": {k: repr(v) for k, v in main.items() if k in ("__name__", "__file__", "__package__", "__doc__", "__cached__")},
        "globals": sorted(main), "loader": type(main["__loader__"]).__name__, "spec": spec and [spec.name, spec.origin],
        "flags": repr(sys.flags), "sys": hasattr(sys, "__getattr__"), "umask": oct(os.umask(0o22)), "timer": signal.getitimer(0)[0] > 0,
        "child": open("/proc/self/task/%d/children" % os.getpid()).read() != "",
    }, sort_keys=True), flush=True)
'''

READS = (
    'note(os.environ.get("RANK"))',
    'note(os.getenv("LOCAL_RANK", "-1"))',
    'note(os.environb.get(b"WORLD_SIZE"))',
    'note("MASTER_ADDR" in os.environ)',
    "note(dict(os.environ))",
    "note(sorted(os.environ.copy()))",
    "note(len(os.environ))",
    'note(os.environ.get("COLOR"), os.environ.get("CACHE"))',
    'note(os.environ["COLOR"])',
    "note(list(sys.argv))",
    'note(getattr(sys, "argv", None))',
    "from sys import argv; note(argv[1:])",
    'import argparse; parser = argparse.ArgumentParser(); parser.add_argument("--lr"); note(parser.parse_known_args())',
    'import argparse; parser = argparse.ArgumentParser(); parser.add_argument("--lr", required=True); note(parser.parse_known_args())',
    "note(os.getcwd(), os.path.abspath('x'))",
    "note(list(sys.path))",
    "note(os.path.exists('data.txt') and open('data.txt').read())",
    'import __main__; note(getattr(__main__, "__file__", None), sorted(vars(__main__)))',
    "note([m for m in sys.modules if m[:2] in ('p_', 'm_', 'n_')])",
    "note(__name__, __file__, __package__)",
    "import signal; note(signal.getsignal(15), signal.getsignal(2))",
    "note(os.path.basename(sys.orig_argv[-1]))",
    'note("MORE" in os.environ and os.environ.pop("MORE"))',
)
WRITES = (
    'os.environ["CACHE"] = "/data"',
    'os.environ["RANK"] = "7"',
    'os.environ.setdefault("COLOR", "green")',
    'os.environ.setdefault("RANK", "0")',
    'os.environ.pop("COLOR", None)',
    'os.putenv("COLOR", "x"); os.environ.update(ADDED="1", CACHE="2")',
    'os.environb[b"BYTES"] = b"\\xff"',
    'sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "vendored"))',
    'sys.path.insert(0, BASE + "/vendored")',
    'sys.path.append(BASE + "/vendored")',
    "sys.path.pop(0)",
    'os.chdir("below")',
    'sys.argv.append("--more")',
    "sys.argv = sys.argv[:1]",
    'sys.argv[1:] = ["changed"]',
    "import threading; threading.Thread(target=threading.Event().wait, name='waits', daemon=True).start()",
    "import signal; signal.signal(signal.SIGTERM, lambda *_: None)",
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    "import signal; signal.setitimer(signal.ITIMER_REAL, 100)",
    'import atexit; atexit.register(print, "at the end", flush=True)',
    "import random; random.seed(5)",
    'print("printed", flush=True)',
    'print("error", file=sys.stderr, flush=True)',
    "import warnings; warnings.warn('be careful')",
    "os.umask(0o77)",
    "import builtins; builtins.extra = open(BASE + '/data.txt')",
    "import subprocess, builtins; builtins.child = subprocess.Popen(['sleep', '2'])",
    "sys.modules['p_3'] = sys",
)
FINAL = "import random; note(random.random() if random.getstate()[1][:3] == random.Random(5).getstate()[1][:3] else 'unseeded')"
RARE = ("raise ImportError('no')", "sys.exit(3)", "raise ValueError('wrong')", "1 / 0")
INSTALLED = ("p_0", "p_1", "p_2", "p_3", "p_pkg", "p_pkg.sub", "n_space.part")
LOCAL = ("m_0", "m_1", "m_pkg", "m_pkg.sub")
VENDORED = ("p_1", "p_3")
SHADOWS = ("p_2", "json", "queue", "colorsys", "p_pkg")


@dataclass
class RandomProgram:
    """Files of one program: installed ones relative to site-packages, others relative to the script's folder."""

    installed: dict[str, str] = field(default_factory=dict)
    local: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = ("train.py",)
    environment: dict[str, str] = field(default_factory=dict)
    rank: dict[str, str] = field(
        default_factory=lambda: {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    )

    def text(self) -> str:
        files = [*((f"site-packages/{n}", t) for n, t in self.installed.items()), *self.local.items()]
        return "\n".join([f"{self.command} {self.arguments} {self.environment}", *(f"--- {n}\n{t}" for n, t in files)])


def _file_of(name: str, packages: tuple[str, ...]) -> str:
    path = name.replace(".", "/")
    return f"{path}/__init__.py" if any(other.startswith(f"{name}.") for other in packages) else f"{path}.py"


def _import_of(rng: random.Random, name: str) -> str:
    parent, _, leaf = name.rpartition(".")
    forms = [f"import {name}", f"import {name} as alias", f"from {name} import value", f"from {name} import *"]
    if parent:
        forms.append(f"from {parent} import {leaf}")
    form = rng.choice(forms)
    return rng.choice(
        [form] * 5 + [f"try:\n    {form}\nexcept ImportError:\n    note('missing')", f"if len('x'):\n    {form}"]
    )


def random_program(seed: int) -> RandomProgram:
    """Draws a program. Names are ordered, and a module imports later ones only, so that imports end."""
    rng = random.Random(seed)
    program = RandomProgram(arguments=tuple(rng.choice([(), ("--lr", "0.5"), ("--lr=1", "x")])))
    program.environment = {k: v for k, v in (("COLOR", "red"), ("MORE", "1")) if rng.random() < 0.7}

    def body(later: tuple[str, ...], quiet: float) -> str:
        lines = [] if rng.random() < 0.3 else ['"""Says something."""']
        lines += [
            "from noting import note",
            "import os, sys",
            "BASE = os.environ['BASE']" if rng.random() < 0.1 else "",
        ]
        for _ in range(rng.randrange(4)):
            draw = rng.random()
            if draw < 0.45 and later:
                lines.append(_import_of(rng, rng.choice(later)))
            elif draw < 0.5 and rng.random() < 0.3:
                lines.append(rng.choice(RARE))
            elif rng.random() > quiet:
                lines.append(rng.choice(READS if rng.random() < 0.6 else WRITES))
        text = "\n".join([*lines, "note('imported')", "value = __name__", ""])
        if "BASE" in text and "BASE = " not in text:
            text = text.replace("import os, sys", "import os, sys\nfrom noting_base import BASE", 1)
        return text

    quiet = rng.choice([0.2, 0.7, 0.95])
    for index, name in enumerate(INSTALLED):
        program.installed[_file_of(name, INSTALLED)] = body(INSTALLED[index + 1 :], quiet)
    for index, name in enumerate(LOCAL):
        program.local[_file_of(name, LOCAL)] = body(LOCAL[index + 1 :] + INSTALLED, 0.3)
    for name in VENDORED:
        program.local[f"vendored/{name}.py"] = body((), 0.5)
    if rng.random() < 0.15:
        program.local[f"{rng.choice(SHADOWS)}.py"] = "from noting import note\nnote('shadow', __file__)\nvalue = 1\n"
    if rng.random() < 0.1:
        program.local["n_space/other.py"] = "value = 2\n"
    if rng.random() < 0.15:
        program.installed["sitecustomize.py"] = "import os, sys\n" + rng.choice(
            [
                "sys.early = os.environ.get('RANK')\n",
                "os.environ['CACHE'] = 'site'\n",
                "sys.early = 3\n",
                "sys.early = sys.argv\n",
            ]
        )
    imports = [
        _import_of(rng, rng.choice(INSTALLED if rng.random() < 0.75 else LOCAL)) for _ in range(rng.randrange(6))
    ]
    lines = [
        '"""A program."""',
        "from __future__ import annotations",
        "import os, sys",
        "from noting import note, report",
    ]
    for statement in imports:
        lines.append(statement)
        if rng.random() < 0.2:
            lines.append(rng.choice(READS + WRITES))
    if any("BASE" in line for line in lines):
        lines.insert(3, "from noting_base import BASE")
    lines += ["note('began', getattr(sys, 'early', None))", FINAL, "if __name__ == '__main__':"]
    lines.append(f"    report({sorted({n.partition('.')[0] for n in (*INSTALLED, *LOCAL)})}, globals())\n")
    script = "\n".join(lines)
    kind = rng.random()
    if kind < 0.7:
        program.local["train.py"] = script
    elif kind < 0.8:
        program.local["m_run/__init__.py"] = body(INSTALLED, quiet)
        program.local["m_run/train.py"] = script
        program.command = ("-m", "m_run.train")
    elif kind < 0.9:
        program.installed["p_run/__init__.py"] = body(INSTALLED, quiet)
        program.installed["p_run/__main__.py"] = script.replace(
            "import os, sys", "import os, sys\nfrom . import p_part", 1
        )
        program.installed["p_run/p_part.py"] = body(INSTALLED, quiet)
        program.command = ("-m", "p_run")
    else:
        program.local["real/train.py"] = script
        program.local["real/m_0.py"] = program.local["m_0.py"]
        program.command = ("link.py",)
    return program


class Workshop:
    """A virtual environment whose packages are exchanged for each program, and a loop for the starter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        base = Path(sys.base_prefix)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.python = folder / "env/bin/python"
        self.packages = folder / f"env/lib/{version}/site-packages"
        self.python.parent.mkdir(parents=True)
        self.packages.mkdir(parents=True)
        self.python.symlink_to(os.path.realpath(sys.executable))
        (folder / "env/pyvenv.cfg").write_text(f"home = {base / 'bin'}\n")
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self._runner.close()

    def write(self, program: RandomProgram) -> Path:
        """Writes the program; returns its folder."""
        code = self.folder / "code"
        for folder in (self.packages, code):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        runtime = Path(starter_module.__file__).parents[2]
        (self.packages / "surefoot.pth").write_text(f"{runtime}\n")
        (self.packages / "noting.py").write_text(NOTING)
        (self.packages / "noting_base.py").write_text(f"BASE = {str(code)!r}\n")
        for root, files in ((self.packages, program.installed), (code, program.local)):
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
        (code / "below").mkdir()
        (code / "data.txt").write_text("data")
        if program.command == ("link.py",):
            (code / "link.py").symlink_to("real/train.py")
        return code

    def _environment(self, program: RandomProgram, code: Path) -> dict[str, str]:
        fixed = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "BASE": str(code)}
        return {"PATH": os.environ["PATH"], "HOME": str(code), **fixed, **program.environment}

    def plain(self, program: RandomProgram, code: Path) -> tuple[int, str]:
        """Exit code and output of the program as the interpreter starts it."""
        environment = {**self._environment(program, code), **program.rank}
        command = [str(self.python), *program.command, *program.arguments]
        result = subprocess.run(
            command, env=environment, cwd=code, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=120, check=False,
        )  # fmt: skip
        return result.returncode, result.stdout.decode(errors="replace")

    def warm(self, program: RandomProgram, code: Path) -> tuple[int, str, str]:
        """Exit code and output of the program as an agent starts it, and the reason for a cold start or how it was forked."""
        return self._runner.run(self._warm(program, code))

    async def _warm(self, program: RandomProgram, code: Path) -> tuple[int, str, str]:
        environment = self._environment(program, code)
        changes: asyncio.Queue[bool] = asyncio.Queue()
        own_folder, own_python = os.getcwd(), sys.executable
        os.chdir(code)
        sys.executable = str(self.python)
        log = self.folder / "rank.log"
        starter = Starter(
            [str(self.python), *program.command, *program.arguments],
            environment,
            self.folder / "server.log",
            changes.put_nowait,
        )
        try:
            starter.start()
            while not await asyncio.wait_for(changes.get(), 120):
                pass
            with log.open("w+b") as output:
                child = await starter.start_trainer({**environment, **program.rank}, str(code), output.fileno())
                result = await asyncio.wait_for(child.exited, 120)
            is_forked = child.pid not in starter.own_pids() and not hasattr(child, "_process")
            return result, log.read_text(errors="replace"), "forked" if is_forked else "cold"
        finally:
            await starter.close()
            os.chdir(own_folder)
            sys.executable = own_python


def comparable(output: str) -> str:
    """The output without addresses of objects."""
    import re

    return re.sub(r"0x[0-9a-f]+", "0x", output)
