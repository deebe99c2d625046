"""Decides which imports of a program the fork server makes in advance, and makes them.

They are a prefix of the program itself: the import statements at its top, as long as each names an
installed package. Everything after them, the first statement that does anything else included, runs in each trainer.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.launcher.import_observer import ImportObserver, installed_folders, is_installed, local_folders
from surefoot.launcher.job_program import LaunchProgram, prepare_module

FRAMEWORKS = (
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch._dynamo",  # the first fully_shard imports it: half a second
    "numpy",
    "surefoot.checkpointer",
    "surefoot.ipc.agent_client",
)
"""Modules that the fork server imports as well if the program's imports include torch."""

_MAX_LOCAL_SOURCES = 500

_ANY_VARIABLE_CHANGED = re.compile(
    r"environb?\s*(\.\s*update\b|\|=|=[^=]|\[\s*[^\"'\s])|environb?\s*\.\s*setdefault\(\s*[^\"'\s]|putenv|dotenv"
)
"""Source text that may set variables whose names are not in it."""


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """The imports to make in advance."""

    statements: tuple[str, ...] = ()
    """Import statements, in the program's order."""
    positions: tuple[int, ...] = ()
    """Position in the source of each one's statement; -1 for a package that is imported before the source is run."""
    stops_at: str = ""
    """Why the list ends before the program does."""
    docstring: str | None = None
    module: str | None = None
    """Name of the module whose source is run, if the program is one."""

    def first(self, count: int, stops_at: str) -> ImportPlan:
        return replace(self, statements=self.statements[:count], positions=self.positions[:count], stops_at=stops_at)

    def position_after(self, made_count: int) -> int:
        """Returns the position of the source's first statement that is not complete after so many imports."""
        if made_count <= self.positions.count(-1):
            return 0
        return self.positions[made_count] if made_count < len(self.positions) else self.positions[-1] + 1


@dataclass(frozen=True, slots=True)
class Warmed:
    """Result of the imports."""

    made_count: int
    """Number of statements that were executed without a problem."""
    problem: str = ""
    """Why the next statement must not be kept; this process is then of no more use."""


def top_level_imports(source: str, package: str | None = None) -> ImportPlan:
    """Lists the import statements at the top of a program, up to its first other statement. Pure.

    `package` is that of a module that is run by its name; relative imports belong to it.
    """
    tree = ast.parse(source)
    plan = ImportPlan(docstring=ast.get_docstring(tree, clean=False))
    statements: list[str] = []
    positions: list[int] = []
    for position, node in enumerate(tree.body):
        if position == 0 and plan.docstring is not None:
            continue
        if isinstance(node, ast.Import):
            # one statement each, so that a problem costs no more than the module that has it
            imports = [ast.unparse(ast.Import([alias])) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            module = node.module or ""
            if node.level:
                module = importlib.util.resolve_name("." * node.level + module, package)
            imports = [ast.unparse(ast.ImportFrom(module, node.names, 0))]
        else:
            text = ast.unparse(node).partition("\n")[0]
            stops_at = f"line {node.lineno} ({text[:60]}) is not an absolute import"
            return replace(plan, statements=tuple(statements), positions=tuple(positions), stops_at=stops_at)
        statements += imports
        positions += [position] * len(imports)
    return replace(plan, statements=tuple(statements), positions=tuple(positions))


def plan_imports(program: LaunchProgram) -> ImportPlan:
    """Reads the program's source and plans its imports; finds the source without importing anything."""
    path, package = Path(program.script or ""), None
    parents: list[str] = []
    module = None
    if program.module is not None:
        module_source = _module_source(program.module)
        if module_source is None:
            return ImportPlan(stops_at=f"the source of {program.module} was not found")
        path, module, parents = module_source
        package = parents[-1] if parents else ""
    try:
        plan = top_level_imports(path.read_text(encoding="utf-8"), package)
    except (OSError, SyntaxError, ValueError) as error:
        return ImportPlan(stops_at=f"{path} cannot be read: {error}")
    # the interpreter imports an empty one without any effect, and so does `prepare_module`
    packages = [f"import {name}" for name in parents if not _is_empty_package(path.parent, parents, name)]
    statements, positions = (*packages, *plan.statements), (*[-1 for _ in packages], *plan.positions)
    plan = replace(plan, statements=statements, positions=positions, module=module)
    for index, statement in enumerate(statements):
        if problem := _import_problem(statement):
            return plan.first(index, problem)
    return plan


def remaining_code(source: bytes, path: str, position: int) -> types.CodeType:
    """Compiles a program without the statements before this position, which the fork server has executed."""
    tree = ast.parse(source, path)
    docstring = [] if ast.get_docstring(tree, clean=False) is None else tree.body[:1]
    rules = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    rest = [node for node in tree.body[position:] if node not in rules and node not in docstring]
    tree.body = [*docstring, *rules, *rest]
    return compile(tree, path, "exec", dont_inherit=True)


def program_source(program: LaunchProgram) -> Path | None:
    """Returns the program's source file; None if it is not found (starting the program will raise the error)."""
    if program.module is None:
        return Path(program.script or "")
    module_source = _module_source(program.module)
    return module_source[0] if module_source is not None else None


def imported_name(statement: str) -> str:
    """Returns the module that an import statement names."""
    (node,) = ast.parse(statement).body
    return node.names[0].name if isinstance(node, ast.Import) else (getattr(node, "module", None) or "")


def _import_problem(statement: str) -> str:
    """Returns why an import cannot be made in advance; empty if it can."""
    name = imported_name(statement).partition(".")[0]
    if name in sys.builtin_module_names:
        return ""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        return f"`{statement}`: {name} was not found"
    places = (
        [spec.origin] if spec.has_location and spec.origin else [f"{p}/" for p in spec.submodule_search_locations or ()]
    )
    folders = installed_folders()
    for place in places:
        if not is_installed(place, folders):
            return f"`{statement}`: {place} is not an installed package"
    return ""


def _module_source(name: str) -> tuple[Path, str, list[str]] | None:
    """Finds the source that `python -m name` runs, the name of its module, and the packages imported before it."""
    parents: list[str] = []
    search: list[str] | None = None
    for part in [*name.split("."), "__main__"]:
        full_name = f"{parents[-1]}.{part}" if parents else part
        spec = importlib.machinery.PathFinder.find_spec(full_name, search)
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            is_source = spec.origin is not None and spec.origin.endswith(".py")
            if not is_source or full_name not in (name, f"{name}.__main__"):
                return None
            return Path(spec.origin or ""), full_name, parents
        parents.append(full_name)
        search = list(spec.submodule_search_locations)
    return None


def _is_empty_package(folder: Path, parents: list[str], name: str) -> bool:
    """Returns whether a package of the program, the last of whose folders this is, has no code of its own."""
    source = folder.parents[len(parents) - 1].joinpath(*name.split("."), "__init__.py")
    return source.is_file() and not source.read_text(encoding="utf-8", errors="replace").strip()


def warm_up(
    statements: Iterable[str], observer: ImportObserver, namespace: dict[str, object], module: str | None = None
) -> Warmed:
    """Executes import statements until one leaves something that must not be kept; `module` is the program's own."""
    count = 0
    for statement in statements:
        try:
            exec(compile(statement, "<import in advance>", "exec", dont_inherit=True), namespace)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # a module may raise anything, SystemExit included
            return Warmed(count, f"`{statement}` fails: {type(error).__name__}: {error}")
        if problem := observer.problem(module):
            return Warmed(count, f"`{statement}`: {problem}")
        count += 1
    return Warmed(count)


def import_program(plan: ImportPlan, observer: ImportObserver, limit: int) -> Warmed:
    """Makes the first `limit` imports of the plan in `__main__`, as the program's own first statements."""
    main = sys.modules["__main__"].__dict__
    package_count = plan.positions.count(-1)
    result = warm_up(plan.statements[: min(limit, package_count)], observer, {}, plan.module)
    if result.problem or limit <= package_count or len(plan.statements) == package_count:
        return result
    if plan.module is not None:
        prepare_module(plan.module, observer.argv)
        observer.accept_modules()  # empty packages of the program
    if plan.docstring is not None:
        main["__doc__"] = plan.docstring
    rest = warm_up(plan.statements[package_count:limit], observer, main, plan.module)
    return Warmed(package_count + rest.made_count, rest.problem)


# ---- framework modules -----------------------------------------------------------------------------------------------
# A program that imports torch needs more of it later. Those modules are imported in advance as well, unless the program's
# own code may set a variable that they read before it would import them itself.


def changed_variable(path: Path, names: frozenset[str]) -> str:
    """Returns where the program's own code may change one of these variables; empty if it does not."""
    any_name = re.compile(rf"[\"']({'|'.join(map(re.escape, sorted(names)))})[\"']") if names else None
    for source_path, source in _local_sources(path).items():
        match = _ANY_VARIABLE_CHANGED.search(source) or (any_name.search(source) if any_name else None)
        if match:
            return f"{source_path} may change a variable ({match.group()})"
    return ""


def _local_sources(path: Path) -> dict[Path, str]:
    """Reads the program and the modules outside the installed packages that its sources name in imports."""
    sources: dict[Path, str] = {}
    folders = installed_folders()
    roots = [Path(entry) for entry in local_folders(folders)]
    pending = [path]
    while pending and len(sources) < _MAX_LOCAL_SOURCES:
        file = pending.pop()
        if file in sources or not file.is_file() or (file != path and is_installed(str(file), folders)):
            continue
        sources[file] = source = file.read_text(encoding="utf-8", errors="replace")
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError):
            continue
        for node in nodes:
            if isinstance(node, ast.Import):
                pending += [file for alias in node.names for file in _files_of(roots, alias.name)]
            elif isinstance(node, ast.ImportFrom):
                bases = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else roots
                for alias in node.names:
                    pending += _files_of(bases, f"{node.module}.{alias.name}" if node.module else alias.name)
    return sources


def _files_of(roots: list[Path], name: str) -> list[Path]:
    parts = name.split(".")
    stems = [root.joinpath(*parts[:length]) for root in roots for length in range(1, len(parts) + 1)]
    return [file for stem in stems for file in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py")]
