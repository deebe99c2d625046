"""What mkdocs does to the pages: files outside `docs/` that a page links to become part of the site.

Links are written for the repository, where they lead to files; one page is read there and on the site alike.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md", "charts/surefoot/values.md")
"""Of the repository, shown as pages."""
LINK = re.compile(r"(?P<before>\]\()(?P<to>[^)#:\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def place_in_repository(page: str) -> str:
    """Where a page of the site is written, from the repository's root."""
    return page if page in PAGES else f"docs/{page}"


def place_on_site(file: str) -> str:
    """Where a file of the repository is on the site; a folder's is not there."""
    return file.removeprefix("docs/")


def relinked(text: str, page: str) -> str:
    """The page's text with links for the site. Links into folders and to files that are not there stay as words."""
    folder = posixpath.dirname(place_in_repository(page))

    def one(found: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(folder, found["to"]))
        if not (ROOT / file).is_file():
            return found[0]
        back = posixpath.relpath(place_on_site(file), posixpath.dirname(page) or ".")
        return f"{found['before']}{back}{found['anchor'] or ''}"

    return LINK.sub(one, text)


def linked_files(text: str, page: str) -> set[str]:
    """Files of the repository outside `docs/` and beside the pages that a page links to."""
    folder = posixpath.dirname(place_in_repository(page))
    named = {posixpath.normpath(posixpath.join(folder, found["to"])) for found in LINK.finditer(text)}
    return {one for one in named if (ROOT / one).is_file() and not one.startswith("docs/") and one not in PAGES}


def on_files(files: Files, config: Any) -> Files:
    """Adds the repository's pages, and each file that a page links to."""
    from mkdocs.structure.files import File

    for page in PAGES:
        files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
    wanted: set[str] = set()
    for file in list(files.documentation_pages()):
        wanted |= linked_files((ROOT / place_in_repository(file.src_uri)).read_text(encoding="utf-8"), file.src_uri)
    for name in sorted(wanted):
        files.append(File.generated(config, name, content=(ROOT / name).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Links for the site; a link into a folder of the repository becomes the folder's name."""
    if config.repo_url:
        # mkdocs would look for README.md and the other pages outside of docs/ in that folder
        page.edit_url = f"{config.repo_url.rstrip('/')}/edit/main/{place_in_repository(page.file.src_uri)}"
    text = relinked(markdown, page.file.src_uri)
    folder = posixpath.dirname(place_in_repository(page.file.src_uri))

    def words(found: re.Match[str]) -> str:
        return (
            f"`{found['to']}`"
            if (ROOT / posixpath.normpath(posixpath.join(folder, found["to"]))).is_dir()
            else found[0]
        )

    return re.sub(r"\[[^\]]*\]\((?P<to>[^)#:\s]+)\)", words, text)
