"""Tables of docs/monitoring.md, written from the declarations of all metrics and compared with them by a test.

`PYTHONPATH=tests python -m support.metrics_reference` writes the part between the page's markers again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from prometheus_client import Counter, Gauge, Histogram

from surefoot import metrics as worker_metrics
from surefoot.memory_server.sidecar.server_monitor import _COUNTERS, _GAUGES, ServerState, render_metrics
from surefoot_operator import metrics as operator_metrics
from surefoot_operator.controller import process_metrics
from surefoot_operator.reconcile.job_metrics import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"
_MARKED = re.compile(r"(?<=<!-- made from surefoot\.metrics)(?P<open>[^\n]*-->\n).*?(?=<!-- end -->)", re.DOTALL)
_EVERY_SERIES = {"namespace", "job", "worker", "server"}
"""Labels that all series of a table have."""
Row = tuple[str, str, Iterable[str], str]
"""Name, type, labels, help text."""


def written(page: str) -> str:
    """The page with its tables as the declarations are now."""
    lines = [line for title, rows in metrics().items() for line in _table(title, rows)]
    return _MARKED.sub(lambda match: "\n".join([match["open"], *lines, ""]), page)


def metrics() -> dict[str, list[Row]]:
    """Every exported metric, by the title of its table."""
    return {
        "Of workers": list(_declared(worker_metrics)),
        "Of jobs, by the operator that leads": [(one.name, one.kind, one.labels, one.text) for one in FAMILIES],
        "Of the operator": [*_declared(operator_metrics), *_declared(process_metrics)],
        "Of the memory tier": list(_exported_by_the_sidecar()),
    }


def _table(title: str, rows: Iterable[Row]) -> Iterator[str]:
    yield from (f"### {title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|")
    for name, kind, labels, text in rows:
        own_labels = ", ".join(f"`{label}`" for label in labels if label not in _EVERY_SERIES)
        yield f"| `{name}` | {kind} | {own_labels} | {text.rstrip('.')} |".replace("|  |", "| |")
    yield ""


def _declared(module: ModuleType) -> Iterator[Row]:
    for metric in vars(module).values():
        if isinstance(metric, Counter | Gauge | Histogram):
            kind = type(metric).__name__.lower()
            suffix = "_total" if kind == "counter" else ""
            yield f"{metric._name}{suffix}", kind, metric._labelnames, metric._documentation


def _exported_by_the_sidecar() -> Iterator[Row]:
    info = {key: "1" for _, key, _ in (*_GAUGES, *_COUNTERS)}
    text = render_metrics([ServerState(is_up=True, is_ready=True, info=info)]).decode()
    for name, help_text in re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE):
        [kind] = re.findall(rf"^# TYPE {name} (\w+)$", text, re.MULTILINE)
        yield name, kind, (), help_text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
