"""docs/integrations.md counts the lines that each framework's script gets, as its diffs show them."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")


def test_the_table_counts_the_added_lines() -> None:
    rows = dict(re.findall(r"^\| \[([^\]]+)\]\(#[^)]+\) \| (\d+) \|", PAGE, re.MULTILINE))
    counted = {}
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        title = section.split("\n", 1)[0]
        [diff] = re.findall(r"^```diff\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        counted[title.replace(" and ", ", ")] = str(sum(line.startswith("+") for line in diff.splitlines()))
    assert counted == rows
