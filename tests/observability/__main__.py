"""`python -m observability`: every PromQL that people are given, asked of a Prometheus that scraped a run with a failure.

Writes build/observability.json (what each expression returned) and build/dashboards.html (the dashboards over that data).
Exits with 1 where an expression lacks what the run had.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from observability import readings
from observability.dashboards_page import Boards, boards_page, drawn_boards
from support import expressions
from support.scraped_run import ScrapedRun, scraped_run
from support.servers.prometheus import SCRAPE_MILLISECONDS

BUILD = Path(__file__).parents[2] / "build"
SHOWN_SECONDS = 30.0
"""How long an expression may take to show what the run has."""
STAND_INS = [
    "companion of the memory tier: the real one, beside the Redis of node-0, labelled with the node as a cluster's scrape is",
    "the operator's watches: its real cache over a stand-in API server, since `surefoot local` watches none",
]


def main() -> int:
    if (server := shutil.which("prometheus")) is None:
        print("observability: no prometheus on PATH: `make system` installs it on Debian as root", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="surefoot-observability-") as folder, scraped_run(Path(folder)) as scraped:
        print("the job has recovered; it goes on to step 150", flush=True)
        scraped.run.wait_for_step(150)
        _settled(scraped)
        found = _read(scraped)
        boards = drawn_boards(scraped.prometheus)
        report = scraped.run.finish().report
    found["run"] = {name: report[name] for name in ("outcome", "steps", "generations", "incidents") if name in report}
    _write(found, boards, server)
    for one in found["defects"]:
        print(f"observability: {one}", file=sys.stderr)
    return 1 if found["defects"] else 0


def _settled(scraped: ScrapedRun) -> None:
    """Until every expression shows what it should, or has had its time."""
    deadline = time.monotonic() + SHOWN_SECONDS
    while expressions.lacking(scraped.prometheus) and time.monotonic() < deadline:
        scraped.run.look()


def _read(scraped: ScrapedRun) -> dict[str, Any]:
    prometheus = scraped.prometheus
    panels = [readings.of(one, prometheus.series(one.promql)) for one in expressions.of_dashboards()]
    choices = [readings.of(one, prometheus.series(one.promql)) for one in expressions.of_choices()]
    compared = [readings.of(one, prometheus.series(one.promql)) for one in expressions.of_alerts()]
    alerts = [readings.of_alert(rule, compared) for rule in prometheus.rules()]
    exported = {one["metric"]["__name__"] for one in prometheus.series('{__name__=~"surefoot_.+"}')}
    return {
        "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "prometheus": prometheus.version(),
        "scrape_milliseconds": SCRAPE_MILLISECONDS,
        "variables": expressions.VARIABLES,
        "stand_ins": STAND_INS,
        "counts": {**readings.counted([*panels, *choices]), "alerts": len(alerts), "recording_rules": 0},
        "defects": readings.defects([*panels, *choices, *compared], alerts),
        "dashboards": panels,
        "choices": choices,
        "alerts": alerts,
        "exported_and_in_no_expression": readings.unused(exported, [*panels, *compared]),
    }


def _write(found: dict[str, Any], boards: Boards, server: str) -> None:
    BUILD.mkdir(exist_ok=True)
    (BUILD / "observability.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (BUILD / "dashboards.html").write_text(boards_page(boards), encoding="utf-8")
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found["counts"].items())
    print(f"{server} {found['prometheus']}: {said}; build/observability.json, build/dashboards.html")


if __name__ == "__main__":
    sys.exit(main())
