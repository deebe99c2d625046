"""A part of the matrix of other people's libraries; all of it is `python -m bench compatibility`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.timeout(600)
def test_no_quick_case_is_wrong(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SUREFOOT_")}
    environment["PYTHONPATH"] = str(TESTS)
    command = [sys.executable, "-W", "ignore", "-m", "compatibility", "--quick", "--json", str(found)]
    ran = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=580)
    rows = json.loads(found.read_text())["rows"] if found.exists() else []
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert len(rows) > 20
    assert [row for row in rows if row["result"] == "wrong"] == []
