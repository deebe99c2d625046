"""`python -m dashboards`: writes every dashboard's JSON into the chart; `--check` says which of them are not current."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import checkpoints, fleet

FOLDER = Path(__file__).parents[1] / "charts" / "surefoot" / "files" / "dashboards"


def text(dashboard: Dashboard) -> str:
    return JSONEncoder(sort_keys=True, indent=2).encode(dashboard) + "\n"


def files() -> dict[Path, str]:
    """Path -> what stands in it."""
    return {FOLDER / f"{board.UID}.json": text(board.built()) for board in (checkpoints, fleet)}


def problems(path: Path, wanted: str) -> list[str]:
    """What is wrong with a file: it is not there, not current, or not what Grafana's types make of it again."""
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    wrong = [] if found == wanted else [f"{path} is not current: run `make dashboards`"]
    if text(Dashboard.from_json(json.loads(wanted))) != wanted:
        wrong.append(f"{path} loses something when it is read by Grafana's types")
    return wrong


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        wrong = [sentence for path, wanted in files().items() for sentence in problems(path, wanted)]
        wrong += [f"{path} is no dashboard of ours: remove it" for path in set(FOLDER.glob("*.json")) - set(files())]
        sys.stderr.writelines(f"{sentence}\n" for sentence in wrong)
        return 1 if wrong else 0
    for path, wanted in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
