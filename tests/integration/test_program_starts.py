"""Under an agent a program observes what `python script.py args` shows it, whatever its modules read and change."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from support.random_programs import RandomProgram, Workshop, comparable, random_program

HEADER = "from noting import note, report\n"
END = "note('began')\nreport((), globals())\n"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    shop = Workshop(tmp_path_factory.mktemp("starts"))
    yield shop
    shop.close()


def difference(workshop: Workshop, program: RandomProgram) -> str:
    """How both starts differ; empty if they do not."""
    code = workshop.write(program)
    plain_code, plain = workshop.plain(program, code)
    warm_code, warm, how = workshop.warm(program, code)
    if (plain_code, comparable(plain)) == (warm_code, comparable(warm)):
        return ""
    return f"{how}: {plain_code} {plain}\n--- and warm {warm_code} {warm}\n--- of {program.text()}"


@pytest.mark.parametrize("seed", range(8))
def test_a_random_program_observes_the_same_in_both_starts(workshop: Workshop, seed: int) -> None:
    assert not difference(workshop, random_program(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_random_programs_observe_the_same_in_both_starts(workshop: Workshop, block: int) -> None:
    for seed in range(500 + 100 * block, 600 + 100 * block):
        assert not difference(workshop, random_program(seed)), seed


INSTALLED_CASES = {
    "RANK": ("import os\nfrom noting import note\nnote(int(os.getenv('RANK', -1)))\n", "p_0 reads the variable RANK"),
    "everything": ("import os\nfrom noting import note\nnote(dict(os.environ))\n", "p_0 reads the whole environment"),
    "arguments": ("import sys\nfrom noting import note\nnote(sys.argv[1:])\n", "p_0 reads sys.argv"),
    "thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
        "starts a thread",
    ),
    "file": ("import builtins\nbuiltins.kept = open(__file__)\n", "leaves a file open"),
    "local": ("import m_0\n", "m_0"),
    "error": ("raise ImportError('no')\n", "fails: ImportError"),
}


@pytest.mark.parametrize("case", INSTALLED_CASES)
def test_an_import_that_is_not_kept_is_named_and_those_before_it_are(
    workshop: Workshop, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    text, reason = INSTALLED_CASES[case]
    program = RandomProgram(arguments=("--lr", "0.5"))
    program.installed = {"p_0.py": text, "p_1.py": "from noting import note\nnote('imported')\n"}
    program.local = {
        "train.py": f"{HEADER}import p_1\nimport p_0\n{END}",
        "m_0.py": "from noting import note\nnote(1)\n",
    }
    caplog.set_level(logging.INFO)
    assert not difference(workshop, program)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in warnings if "import p_0" in text and reason in text], warnings
    assert "with 3 imports of the program" in caplog.text or "with 2 imports of the program" in caplog.text


def test_what_a_kept_import_prints_and_changes_reaches_every_trainer(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    program = RandomProgram(environment={"COLOR": "red"})
    program.installed["p_0.py"] = (
        "import atexit, os, signal, sys\nprint('hello', flush=True)\nos.environ['CACHE'] = os.environ['COLOR']\n"
        "atexit.register(print, 'bye', flush=True)\nsignal.signal(signal.SIGTERM, lambda *_: None)\n"
        "sys.path.insert(0, '/nowhere')\n"
    )
    program.local["train.py"] = f"{HEADER}import p_0\n{END}"
    caplog.set_level(logging.INFO)
    assert not difference(workshop, program)
    assert "with 2 imports of the program" in caplog.text


def test_a_variable_that_the_script_sets_is_seen_by_the_imports_below_it(workshop: Workshop) -> None:
    program = RandomProgram()
    program.installed["p_0.py"] = "import os\nfrom noting import note\nnote(os.environ.get('CACHE'))\n"
    program.local["train.py"] = f"{HEADER}import os\nos.environ['CACHE'] = '/data'\nimport p_0\n{END}"
    assert not difference(workshop, program)


@pytest.mark.parametrize("root", ["installed", "local"])
def test_a_module_that_is_run_by_its_name_has_its_imports_made_too(
    workshop: Workshop, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    program = RandomProgram(command=("-m", "p_run.train"), arguments=("--lr", "0.5"))
    files = {"p_run/__init__.py": "", "p_run/train.py": f"{HEADER}import p_0\n{END}"}
    (program.installed if root == "installed" else program.local).update(files)
    program.installed["p_0.py"] = (
        "from noting import note\nimport __main__\nnote(__main__.__file__, __main__.__package__)\n"
    )
    caplog.set_level(logging.INFO)
    assert not difference(workshop, program)
    assert "with 2 imports of the program" in caplog.text
