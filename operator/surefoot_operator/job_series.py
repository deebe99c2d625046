"""Keeps the figures of many jobs in little memory.

Used by `metrics`. A series of prometheus-client is an object with a lock of its own, and a job that runs has a hundred and
thirty: fifty kilobytes a job. Here a series is one entry of its job. Where jobs are many its line is written straight away:
a sample for each of a thousand jobs' series took a second of CPU, and thirty megabytes, at each scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from surefoot.protocol.latency import BUCKETS_SECONDS

Job = tuple[str, str]
"""Namespace and name."""
Labels = tuple[str, ...]

_JOB: Labels = ("namespace", "job")
_ENDLESS: Labels = ("node",)
"""Labels that take ever new values."""
LINES_AT_A_TIME = 256
"""Series that are written in one turn: about a millisecond."""
_MOST: Sequence[float] = (*BUCKETS_SECONDS, float("inf"))
_Seconds: TypeAlias = tuple[float, ...]
"""Of a histogram: the sum, then the count in each bucket; empty where nothing was observed."""
_Figure: TypeAlias = float | _Seconds


@dataclass(frozen=True, slots=True, eq=False)
class JobFamily:
    """One metric that each job has."""

    name: str
    text: str
    kind: Literal["gauge", "counter", "histogram"] = "gauge"
    more: Labels = ()
    """Labels beside the job's own."""

    @property
    def labels(self) -> Labels:
        return (*_JOB, *self.more)

    def shown(self, found: Sequence[tuple[Labels, _Figure]]) -> Metric:
        """Renders these series of the family, given by their labels' values."""
        if self.kind == "histogram":
            timed = HistogramMetricFamily(self.name, self.text, labels=self.labels)
            for values, figure in found:
                assert isinstance(figure, tuple)
                total, *counts = figure or (0.0,) * (len(_MOST) + 1)
                timed.add_metric(values, _cumulative(counts), total)
            return timed
        made = (CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily)(
            self.name, self.text, labels=self.labels
        )
        for values, figure in found:
            assert isinstance(figure, float)
            made.add_metric(values, figure)
        return made

    def head(self) -> str:
        """The lines above the family's series."""
        # the older of the two formats that prometheus-client writes names a counter's head as its series
        return f"# HELP {self.name} {self.text}\n# TYPE {self.name} {self.kind}\n"

    def line(self, values: Labels, figure: _Figure) -> str:
        """One series as text, as Prometheus reads it."""
        shown = dict(zip(self.labels, map(_escaped, values), strict=True))
        if isinstance(figure, float):
            return f"{self.name}{_in_braces(shown)} {floatToGoString(figure)}\n"  # type: ignore[no-untyped-call]
        total, *counts = figure or (0.0,) * (len(_MOST) + 1)
        buckets = _cumulative(counts)
        lines = [f"{self.name}_bucket{_in_braces({**shown, 'le': most})} {count}\n" for most, count in buckets]
        inside, told = _in_braces(shown), floatToGoString(total)  # type: ignore[no-untyped-call]
        return f"{''.join(lines)}{self.name}_count{inside} {buckets[-1][1]}\n{self.name}_sum{inside} {told}\n"


_Key: TypeAlias = tuple[JobFamily, Labels]
_Figures: TypeAlias = dict[_Key, _Figure]


class JobSeries:
    """One series of one job, for whoever sets it."""

    __slots__ = ("_figures", "_key")

    def __init__(self, figures: _Figures, key: _Key) -> None:
        self._figures, self._key = figures, key

    @property
    def value(self) -> float:
        """What a gauge or a counter shows now."""
        figure = self._figures[self._key]
        assert isinstance(figure, float)
        return figure

    def set(self, value: float) -> None:
        self._figures[self._key] = float(value)

    def inc(self, amount: float = 1.0) -> None:
        assert amount >= 0, "counters only grow"
        self._figures[self._key] = self.value + amount

    def observe(self, seconds: float) -> None:
        figure = self._figures[self._key]
        assert isinstance(figure, tuple)
        total, *counts = figure or (0.0,) * (len(_MOST) + 1)
        counts[bisect_left(_MOST, seconds)] += 1.0
        self._figures[self._key] = (total + seconds, *counts)  # another tuple: a scrape may be reading this one


class JobCollector(Collector):
    """The series of all jobs, as prometheus-client collects them."""

    def __init__(self) -> None:
        self._families: dict[JobFamily, None] = {}
        self._jobs: dict[Job, _Figures] = {}
        self._keys: dict[_Key, _Key] = {}
        """One key for all jobs, but where a label takes ever new values."""

    def add(self, family: JobFamily) -> JobFamily:
        """Knows one more family, and returns it."""
        self._families[family] = None
        return family

    def of(self, family: JobFamily, job: Job, *more: str) -> JobSeries:
        """Returns a series of this job, begun if it was not there."""
        figures, key = self._jobs.setdefault(job, {}), (family, more)
        if key not in figures:
            if not set(_ENDLESS) & set(family.more):
                key = self._keys.setdefault(key, key)
            figures[key] = () if family.kind == "histogram" else 0.0
        return JobSeries(figures, key)

    def end(self, family: JobFamily, job: Job, *more: str) -> None:
        """One series of this job ends, if it is there."""
        self._jobs.get(job, {}).pop((family, more), None)

    def end_all(self, job: Job, families: Sequence[JobFamily] | None = None) -> None:
        """Every series of this job ends, or those of some families."""
        if families is None:
            self._jobs.pop(job, None)
            return
        figures = self._jobs.get(job, {})
        for key in [key for key in figures if key[0] in families]:
            del figures[key]

    def describe(self) -> Iterator[Metric]:
        """Names the families, so that nothing else takes their names."""
        return (family.shown(()) for family in self._families)

    def collect(self) -> Iterator[Metric]:
        """Renders every series as samples: for few jobs."""
        found = self._found()
        for family in list(found):
            yield family.shown(found.pop(family))

    def text(self) -> Iterator[bytes]:
        """Renders every series as text, a little at a time."""
        found = self._found()
        for family in list(found):
            lines = [family.head()]
            for values, figure in found.pop(family):
                lines.append(family.line(values, figure))
                if len(lines) >= LINES_AT_A_TIME:
                    yield "".join(lines).encode()
                    lines.clear()
            yield "".join(lines).encode()

    def _found(self) -> dict[JobFamily, list[tuple[Labels, _Figure]]]:
        """All series. Others may change them meanwhile, in threads of their own: `copy` is one step, and `list` of items is not."""
        found: dict[JobFamily, list[tuple[Labels, _Figure]]] = {family: [] for family in self._families}
        for job, figures in self._jobs.copy().items():
            for (family, more), figure in figures.copy().items():
                found[family].append(((*job, *more), figure))
        return found


def _in_braces(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{labels[name]}"' for name in sorted(labels)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _cumulative(counts: Sequence[float]) -> list[tuple[str, float]]:
    buckets, below = [], 0.0
    for most, count in zip(_MOST, counts, strict=True):
        below += count
        buckets.append((floatToGoString(most), below))  # type: ignore[no-untyped-call]
    return buckets
