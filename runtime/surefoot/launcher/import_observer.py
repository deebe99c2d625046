"""Observes an import in the fork server: its reads of the process, and its changes that a fork would not pass on.

A rank's process differs from the fork server's in the rank's variables alone. An import that read one of those, or left
something that a forked child lacks or shares (a thread, an open file, a child process), is not kept: each trainer makes it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

from surefoot.linux_process import children, initial_environment

RANK_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "SUREFOOT_AGENT_SOCKET",
        "SUREFOOT_GENERATION",
        "SUREFOOT_STACK_DUMP_FILE",
    }
)
"""Variables that the agent sets for each rank: the fork server does not know their values."""

FORK_SAFETY = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables of the fork server's process, so that no import starts OpenMP's threads or initialises CUDA."""

_FILTERING_READERS = {
    "tqdm.utils": "TQDM_",
    "fsspec.config": "FSSPEC",
    "dask.config": "DASK_",
    "urllib.request": ".*_proxy$|REQUEST_METHOD",
    "wsgiref.handlers": "(?!)",  # copies all variables, which a WSGI application reads of each request and never at import
}
"""Modules that go through the whole environment for variables that match a pattern. The first is part of torch's import."""

_INTERPRETER_VARIABLES = re.compile("PYTHON|LD_|MALLOC_|GLIBC_")
"""Read when a process starts, so that a change after that has no effect."""

_EARLY_READS = re.compile(
    rf"\b({'|'.join(sorted(RANK_VARIABLES))})\b|\bargv\b"
    r"|\b_?environb?\b(?!\s*(\[|\.(get|setdefault|pop)\())"
)
"""Text of a module that may read the unknown variables or the arguments; some modules with such text do not."""

FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
"""Names of threads that may run during a fork: jemalloc locks and resets its own around a fork.

pyarrow starts it, and so do pandas, datasets and transformers' Trainer, whose imports take longest of all."""


_STANDARD_FOLDER = os.path.dirname(os.__file__)
_STANDARD_CODE = ("<frozen", f"{_STANDARD_FOLDER}/", f"{os.path.realpath(_STANDARD_FOLDER)}/")


def other_threads() -> list[str]:
    """Lists the names of threads that a forked child would lack."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            if int(thread) != os.getpid():
                names.append(
                    Path(f"/proc/self/task/{thread}/comm").read_text(encoding="ascii", errors="replace").strip()
                )
    return [name for name in names if name not in FORK_SAFE_THREADS]


# ---- where modules come from -----------------------------------------------------------------------------------------


def installed_folders() -> tuple[str, ...]:
    """Lists the folders of the standard library and of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(name) for name in names] + site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return tuple(dict.fromkeys(os.path.realpath(folder) for folder in folders))


def is_installed(path: str, folders: tuple[str, ...]) -> bool:
    """Returns whether a file belongs to the standard library, an installed package or Surefoot itself."""
    own_folder = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    return os.path.realpath(path).startswith(tuple(folder + os.sep for folder in (*folders, own_folder)))


def local_folders(folders: tuple[str, ...]) -> list[str]:
    """Lists the entries of `sys.path` that are none of the installed packages' `folders`: the program's own."""
    return [entry for entry in sys.path if not is_installed(os.path.join(entry, "x"), folders)]


def local_module(names: set[str], folders: tuple[str, ...]) -> str | None:
    """Returns one of these loaded modules whose code is no installed package, with its path; or None."""
    for name in sorted(names):
        # by the dictionary: reading an attribute of a lazy module would import it
        module = sys.modules.get(name)
        is_program = module is sys.modules["__main__"]  # `multiprocessing` has it as `__mp_main__` too
        attributes = vars(module) if isinstance(module, types.ModuleType) and not is_program else {}
        path = attributes.get("__file__")
        paths = [path] if isinstance(path, str) else []
        with contextlib.suppress(TypeError):  # no path, or one of another kind
            paths += [] if paths else [folder + os.sep for folder in attributes.get("__path__", ())]
        for path in paths:
            if os.path.isabs(path) and os.path.exists(path) and not is_installed(path, folders):
                return f"{name} ({path})"
    return None


def early_reader(startup_modules: frozenset[str]) -> str | None:
    """Returns a module or `.pth` file that the interpreter ran at its start and that may have read a rank's variables.

    `sitecustomize` and the `import` lines of `.pth` files run before anything can be observed, so their text decides.
    """
    standard = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    packages = tuple(os.path.realpath(folder) for folder in site.getsitepackages())
    for name in sorted(startup_modules):
        path = vars(sys.modules[name]).get("__file__") if name in sys.modules else None
        if not path or name == "__main__":
            continue
        if is_installed(path, standard) and not is_installed(path, packages) and not name.endswith("customize"):
            continue
        if _EARLY_READS.search(Path(path).read_text(encoding="utf-8", errors="replace")):
            return f"{name} ({path})"
    for folder in map(Path, packages):
        for file in sorted(folder.glob("*.pth")):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            if any(_EARLY_READS.search(line) for line in lines if line.startswith(("import ", "import\t"))):
                return str(file)
    return None


# ---- observation -----------------------------------------------------------------------------------------------------


class _ObservedVariables(dict[bytes, bytes]):
    """The data of `os.environ` and `os.environb`, which reports each use to the observer."""

    def __init__(self, data: Mapping[bytes, bytes], observer: ImportObserver) -> None:
        super().__init__(data)
        self._observer = observer

    def __getitem__(self, name: bytes) -> bytes:
        self._observer.note_read(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, bytes):
            self._observer.note_read(name)
        return super().__contains__(name)

    def __setitem__(self, name: bytes, value: bytes) -> None:
        self._observer.note_write(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: bytes) -> None:
        self._observer.note_read(name)
        self._observer.note_write(name)
        super().__delitem__(name)

    def __iter__(self) -> Iterator[bytes]:
        self._observer.note_iteration()
        return super().__iter__()

    def __len__(self) -> int:
        self._observer.note_iteration()
        return super().__len__()

    def items_unobserved(self) -> dict[bytes, bytes]:
        return dict(super().items())


class ImportObserver:
    """Observes the imports made between `start` and `stop`.

    Args:
        environment: What every rank of this worker has; the process's own has FORK_SAFETY as well.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
        # a dictionary for its order
        self._written: dict[bytes, None] = dict.fromkeys(_changed_at_startup())
        for name in self._written:
            self._environment.pop(name, None)
            if name in os.environb:
                self._environment[name] = os.environb[name]
        self._reads: dict[bytes, str] = {}
        self.recent_reads: set[str] = set()
        """Names of the variables that were read since a caller last cleared this."""
        self._patterns: dict[str, str] = {}
        self._problem = ""
        self._folders = installed_folders()

    # ---- start and stop

    def start(self) -> None:
        self._added = {
            os.fsencode(name): os.fsencode(value)
            for name, value in FORK_SAFETY.items()
            if os.fsencode(name) not in self._environment
        }
        data = _ObservedVariables({**self._environment, **self._added}, self)
        os.environ._data = os.environb._data = data  # type: ignore[attr-defined]  # no public way sees every read
        self.argv = sys.argv  # readable here without notice
        del sys.argv  # its reads then reach the module's __getattr__
        vars(sys)["__getattr__"] = self._read_argv
        self._folder = os.getcwd()
        self._files = _open_files()
        self._random = random.getstate()
        self._modules = set(sys.modules)

    def stop(self) -> None:
        del vars(sys)["__getattr__"]
        sys.argv = self.argv
        data = os.environ._data.items_unobserved()  # type: ignore[attr-defined]
        for name in self._added.keys() - self._written.keys():
            data.pop(name, None)
        self._environment = dict(data)
        os.environ._data = os.environb._data = data  # type: ignore[attr-defined]

    def accept_modules(self) -> None:
        """Takes the modules that are loaded now for such as the program has at its start."""
        self._modules = set(sys.modules)

    # ---- what imports do

    def note_read(self, name: bytes) -> None:
        if name in self._written or name in self._added:
            return
        reader, importer = _reader()
        if reader in _FILTERING_READERS:
            self._patterns.setdefault(_FILTERING_READERS[reader], importer)
            return
        self._reads.setdefault(name, importer)
        self.recent_reads.add(os.fsdecode(name))
        if os.fsdecode(name) in RANK_VARIABLES:
            self._note_problem(f"{importer} reads the variable {os.fsdecode(name)}, which differs between ranks")

    def note_write(self, name: bytes) -> None:
        self._written[name] = None

    def note_iteration(self) -> None:
        reader, importer = _reader()
        if reader in _FILTERING_READERS:
            self._patterns.setdefault(_FILTERING_READERS[reader], importer)
        else:
            self._note_problem(f"{importer} reads the whole environment, which differs between ranks")

    def _read_argv(self, name: str) -> list[str]:
        if name != "argv":
            raise AttributeError(f"module 'sys' has no attribute {name!r}")
        self._note_problem(f"{_reader()[1]} reads sys.argv")
        return self.argv

    def _note_problem(self, text: str) -> None:
        self._problem = self._problem or text

    # ---- judgement

    def problem(self, program_module: str | None) -> str:
        """Returns why the imports since `start` must not be kept; empty if they may be."""
        return self._problem or self._trace(program_module)

    def _trace(self, program_module: str | None) -> str:
        """Names the first trace of the imports that a fork would not pass on."""
        new_modules = set(sys.modules) - self._modules
        local = local_module(new_modules, self._folders)
        new_files = _open_files() - self._files
        # a device file of CUDA's driver: a process forked after that cannot use the GPU
        devices = sorted(path for path in new_files if path.startswith("/dev/nvidia"))
        torch = sys.modules.get("torch")
        if devices or (torch is not None and _is_cuda_initialized(torch)):
            return f"it initialises CUDA{f' (opens {devices[0]})' if devices else ''}"
        if local is not None:
            return f"it imports {local}, which is not an installed package"
        if program_module in new_modules:
            return f"it imports the program itself ({program_module})"
        if threads := other_threads():
            return f"it starts a thread ({threads[0]})"
        if new_files:
            return f"it leaves a file open ({sorted(new_files)[0]})"
        if children(os.getpid()):
            return "it starts a process"
        if any(
            any(signal.getitimer(timer)) for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        ):
            return "it sets a timer"
        if "argv" in vars(sys):
            return "it sets sys.argv"
        if os.getcwd() != self._folder:
            return "it changes the working folder"
        if random.getstate() != self._random:
            return "it uses or seeds the random numbers of the module random"
        return ""

    # ---- at a fork

    def difference(self, environment: Mapping[str, str]) -> str:
        """Returns why a program with this environment must start cold: an import saw another value; else empty."""
        names = set(map(os.fsdecode, self._environment)) | set(environment)
        for name in sorted(names):
            key = os.fsencode(name)
            value = self._environment.get(key)
            if key in self._written or (os.fsdecode(value) if value is not None else None) == environment.get(name):
                continue
            if _INTERPRETER_VARIABLES.match(name):
                return f"the interpreter read {name}, which is another one for this trainer"
            if key in self._reads:
                return f"{self._reads[key]} read the variable {name}, which is another one for this trainer"
            for pattern, module in self._patterns.items():
                if re.match(pattern, name):
                    return f"{module} read the variable {name}, which is another one for this trainer"
        return ""

    def apply(self, environment: Mapping[str, str]) -> None:
        """Gives this process the trainer's environment, with the changes that the imports have made to it."""
        wanted = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
        for name in self._written:
            if name in self._environment:
                wanted[name] = self._environment[name]
            else:
                wanted.pop(name, None)
        for name in list(os.environb):  # clear() reads all names again for each
            del os.environb[name]
        os.environb.update(wanted)
        for safety_name in FORK_SAFETY.keys() - os.environ.keys():
            os.unsetenv(safety_name)  # the process has it and os.environ does not, so that clear() left it


def _reader() -> tuple[str, str]:
    """Names the module that reads now, and the innermost module outside the standard library on whose behalf it does."""
    reader = ""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        path = frame.f_code.co_filename
        if name not in ("os", "collections.abc", "_collections_abc", __name__):
            reader = reader or name
            in_packages = "site-packages" in path or "dist-packages" in path
            if in_packages or not (path.startswith(_STANDARD_CODE) or name.startswith("surefoot.launcher.")):
                return reader, name
        frame = frame.f_back
    return reader, reader or "an import"


def _is_cuda_initialized(torch: types.ModuleType) -> bool:
    cuda = vars(torch).get("cuda")
    return cuda is not None and bool(cuda.is_initialized())


def _open_files() -> frozenset[str]:
    files = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            files.add(f"{os.readlink(f'/proc/self/fd/{descriptor}')}, descriptor {descriptor}")
    return frozenset(file for file in files if not file.startswith("/proc/"))


def _changed_at_startup() -> list[bytes]:
    """Returns the variables that the interpreter and its startup files have changed, in their order."""
    initial, current = initial_environment(), dict(os.environb)
    return [name for name in {**current, **initial} if initial.get(name) != current.get(name)]
