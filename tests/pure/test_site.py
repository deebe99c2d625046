"""The site's pages: each document is in its navigation, links out of docs/ lead to files."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
LINK = re.compile(r"\]\((?P<to>[^)#:\s]*)(?:#(?P<section>[^)\s]+))?\)")
TUTORIAL = (DOCS / "tutorial.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """mkdocs loads it as a file, and so does this."""
    found = importlib.util.spec_from_file_location("site_hooks", DOCS / "site.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_every_document_is_in_the_navigation_once(site: ModuleType) -> None:
    named = re.findall(r"[\w./-]+\.md", NAVIGATION)
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(site.PAGES)
    assert sorted(named) == sorted(there)


def test_nothing_of_the_hook_is_published() -> None:
    configuration = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    excluded = re.search(r"^exclude_docs: \|\n((?:  .+\n)+)", configuration, re.MULTILINE)
    assert excluded is not None
    assert excluded[1].split() == ["/site.py", "__pycache__/"]  # its bytecode was a page of the site


def test_links_lead_to_files_and_sections_that_exist(site: ModuleType) -> None:
    broken = []
    for page in [*site.PAGES, *(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))]:
        place = ROOT / site.place_in_repository(page)
        for link in LINK.finditer(place.read_text(encoding="utf-8")):
            target = place.parent / link["to"] if link["to"] else place
            is_section_missing = link["section"] and target.suffix == ".md" and link["section"] not in sections(target)
            if not target.exists() or is_section_missing:
                broken.append(f"{page}: {link[0]}")
    assert broken == []


NAMED = re.compile(r"docs/(?P<page>[\w/-]+\.md)(?:#(?P<section>[\w-]+))?")
NAMING = ("operator", "runtime", "charts", "dashboards", "docker", "examples", "bench", "manifests")


@pytest.mark.parametrize("folder", NAMING)
def test_pages_and_sections_that_messages_and_comments_name_exist(folder: str) -> None:
    missing = []
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in {".py", ".yaml", ".txt", ".tpl", ".json", ".md", ".Dockerfile"} and path.is_file():
            for name in NAMED.finditer(path.read_text(encoding="utf-8")):
                page = DOCS / name["page"]
                if not page.is_file() or (name["section"] and name["section"] not in sections(page)):
                    missing.append(f"{path.relative_to(ROOT)}: {name[0]}")
    assert missing == []


@cache
def sections(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w -]", "", text).strip().lower().replace(" ", "-") for text in texts}


@pytest.mark.parametrize(
    ("page", "text", "told"),
    [
        ("cli.md", "[a](../README.md)", "[a](README.md)"),
        ("cli.md", "[a](../README.md#install)", "[a](README.md#install)"),
        ("adr/0003-trainers-are-forked.md", "[a](../architecture.md)", "[a](../architecture.md)"),
        ("README.md", "[a](docs/cli.md#exit-codes)", "[a](cli.md#exit-codes)"),
        ("tests/README.md", "[a](../docs/cluster.md)", "[a](../cluster.md)"),
        ("README.md", "[a](docs/nothing.md)", "[a](docs/nothing.md)"),
    ],
)
def test_links_are_written_for_the_repository_and_read_on_the_site(
    site: ModuleType, page: str, text: str, told: str
) -> None:
    assert site.relinked(text, page) == told


def test_the_tutorial_s_diff_is_of_two_scripts() -> None:
    """The one before has nothing of Surefoot; tests/integration/test_documented_programs.py runs the one after."""
    [diff] = re.findall(r"^```diff\n(.*?)^```$", TUTORIAL, re.DOTALL | re.MULTILINE)
    before = "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("+"))
    assert "surefoot" not in before
    compile(before, "before.py", "exec")
