"""Which imports of a program are made in advance: a prefix of what the program itself would execute."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from surefoot.launcher import warm_imports
from surefoot.launcher.job_program import LaunchProgram, parse_forkable_program
from surefoot.launcher.warm_imports import changed_variable, plan_imports, remaining_code, top_level_imports


def test_imports_end_at_the_first_statement_that_is_another() -> None:
    source = '"""Text."""\nfrom __future__ import annotations\nimport a, b.c as d\nfrom e.f import g, h\n'
    plan = top_level_imports(source + "os.environ['X'] = '1'\nimport never\n")
    expected = ("from __future__ import annotations", "import a", "import b.c as d", "from e.f import g, h")
    assert (plan.statements, plan.positions) == (expected, (1, 2, 2, 3))
    assert plan.stops_at.startswith("line 5 (os.environ['X'] = '1')")


@pytest.mark.parametrize(
    "statement",
    ["try:\n    import b\nexcept ImportError: pass", "if True:\n    import b", "from . import b", "x = 1", "print()"],
)
def test_whatever_is_no_plain_import_ends_them(statement: str) -> None:
    assert top_level_imports(f"import a\n{statement}\nimport c\n").statements == ("import a",)


def test_a_relative_import_of_a_module_is_that_of_its_package() -> None:
    assert top_level_imports("from . import b\nfrom ..c import d\n", "top.sub").statements == (
        "from top.sub import b",
        "from top.c import d",
    )


def test_what_lies_next_to_the_script_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "settings_of_mine.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text("import colorsys\nimport settings_of_mine\nimport json\n")
    plan = plan_imports(LaunchProgram((), script=str(script)))
    assert plan.statements == ("import colorsys",)
    assert str(tmp_path / "settings_of_mine.py") in plan.stops_at


def test_a_program_continues_where_its_imports_ended(tmp_path: Path) -> None:
    source = b'"""Text."""\nfrom __future__ import annotations\nimport a_missing_module\nx: int = 1\n'
    namespace: dict[str, object] = {}
    exec(remaining_code(source, str(tmp_path / "x.py"), 3), namespace)
    assert (namespace["__doc__"], namespace["x"]) == ("Text.", 1)
    assert namespace["__annotations__"] == {"x": "int"}


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("import os\nos.environ['RANK']", False),
        ("import os\nos.environ['TORCH_LOGS'] = 'x'", True),
        ("import os\nos.environ.update(settings)", True),
        ("import os\nos.environ[name] = 'x'", True),
        ("import os\nos.environ |= x", True),
        ("from dotenv import load_dotenv", True),
        ("import helper_of_mine", True),
        ("print(1)", False),
    ],
)
def test_modules_for_later_use_wait_where_the_program_may_change_what_they_read(
    source: str, changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper_of_mine.py").write_text("import os\nos.environ.setdefault('TORCH_LOGS', 'x')\n")
    script = tmp_path / "train.py"
    script.write_text(source)
    assert bool(changed_variable(script, frozenset({"TORCH_LOGS", "HOME"}))) == changes


def test_sources_that_name_each_other_are_read_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one_of_mine.py").write_text("import other_of_mine")
    (tmp_path / "other_of_mine.py").write_text("import one_of_mine")
    assert len(warm_imports._local_sources(tmp_path / "one_of_mine.py")) == 2


@pytest.mark.parametrize("name", ["app.pyz", "app.zip", "train.pyc"])
def test_an_archive_is_started_by_the_interpreter(name: str) -> None:
    assert parse_forkable_program(["python", name], {"PATH": os.path.dirname(sys.executable)}) is None
