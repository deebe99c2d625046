"""docs/python.md and its neighbours say what the code says: every name, signature, option and environment variable."""

import re
from pathlib import Path

import pytest

import surefoot
from support.python_reference import PAGE, PAGES, marked, parameters, written

TEXT = PAGE.read_text(encoding="utf-8")
SETTINGS = Path(surefoot.__file__).with_name("settings.py").read_text(encoding="utf-8")


def section(name: str) -> str:
    return re.split(r"^## ", TEXT.partition(f"## {name}\n")[2], flags=re.MULTILINE)[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_signatures_are_those_of_the_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert written(text) == text, "write them anew: PYTHONPATH=tests python -m support.python_reference"


def test_every_name_that_surefoot_offers_is_there() -> None:
    assert {f"surefoot.{name}" for name in surefoot.__all__ if name != "__version__"} <= set(marked(TEXT))


@pytest.mark.parametrize("name", ["Checkpointer", "ElasticLoader", "ElasticStream"])
def test_every_option_has_a_row(name: str) -> None:
    cells = re.findall(r"^\| (`[^|]*) \|", section(name), flags=re.MULTILINE)
    rows = re.findall(r"`(\w+)`", " ".join(cells))
    assert sorted(rows) == sorted(set(parameters(f"surefoot.{name}")) - {"link"}), "`link` is for tests"


def test_every_variable_that_a_script_s_process_reads_is_there() -> None:
    read = SETTINGS.partition("def job_settings")[2].partition("\ndef ")[0]
    names = set(re.findall(r'"((?:SUREFOOT|AWS)_[A-Z_]+)"', read))
    told = set(re.findall(r"`((?:SUREFOOT|AWS)_[A-Z_]+)`", TEXT))
    assert names - told == set()
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(surefoot.__file__).parent.rglob("*.py"))
    assert {name for name in told if name not in sources} == set(), "what nobody reads any more"
