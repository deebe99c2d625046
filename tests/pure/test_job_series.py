"""Series of jobs that are kept in little: they read as the library's own do, and a job costs a few kilobytes."""

from __future__ import annotations

import gc
import sys
import threading
import time
import tracemalloc

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from surefoot.protocol.timeouts import BUCKETS_SECONDS
from surefoot_operator import metrics
from surefoot_operator.metrics import JobCollector, JobFamily
from surefoot_operator.reconcile import job_metrics

JOB = ("default", "t")
ODD = 'a "quoted\\\n'


def test_they_read_as_series_of_the_library_do() -> None:
    theirs, ours, collector = CollectorRegistry(), CollectorRegistry(), JobCollector()
    labels = ["namespace", "job", "kind"]
    gauge = Gauge("g", "A gauge.", labels, registry=theirs).labels(*JOB, ODD)
    counter = Counter("c_total", "A counter.", labels, registry=theirs).labels(*JOB, ODD)
    timed = Histogram("h_seconds", "Times.", labels, registry=theirs, buckets=BUCKETS_SECONDS)
    kinds = {
        "gauge": JobFamily("g", "A gauge.", "gauge", ("kind",)),
        "counter": JobFamily("c_total", "A counter.", "counter", ("kind",)),
        "histogram": JobFamily("h_seconds", "Times.", "histogram", ("kind",)),
    }
    for family in kinds.values():
        collector.add(family)
    ours.register(collector)
    timed.labels(*JOB, "never")
    collector.of(kinds["histogram"], JOB, "never")
    for value in (3.0, -1.5):
        gauge.set(value)
        collector.of(kinds["gauge"], JOB, ODD).set(value)
    for amount in (0.0, 2.0):
        counter.inc(amount)
        collector.of(kinds["counter"], JOB, ODD).inc(amount)
    for seconds in (0.0005, 0.001, 0.3, 1e6):
        timed.labels(*JOB, "b").observe(seconds)
        collector.of(kinds["histogram"], JOB, "b").observe(seconds)
    assert generate_latest(ours) == generate_latest(theirs)
    assert b"".join(collector.text()) == generate_latest(theirs)


def test_a_counter_never_falls() -> None:
    collector = JobCollector()
    family = collector.add(JobFamily("c_total", "A counter.", "counter"))
    with pytest.raises(AssertionError):
        collector.of(family, JOB).inc(-1.0)


def test_they_are_read_while_they_change() -> None:
    collector = JobCollector()
    family = collector.add(JobFamily("g", "A gauge.", "gauge", ("node",)))
    ended, interval = threading.Event(), sys.getswitchinterval()

    def change() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            job = ("default", f"job-{number % 300}")
            collector.of(family, job, f"n{number}").set(1.0)
            if number % 7 == 0:
                collector.end_all(job)

    def collected(phase: str, _: object) -> None:
        time.sleep(0)  # as any finalizer lets others run

    changing, thresholds = threading.Thread(target=change), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(100)
    gc.callbacks.append(collected)
    try:
        changing.start()
        for _ in range(100):
            (found,) = collector.collect()
            assert all(sample.value in (0.0, 1.0) for sample in found.samples)
    finally:
        ended.set()
        changing.join()
        gc.callbacks.remove(collected)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


def test_a_job_that_counts_everything_costs_a_few_kilobytes() -> None:
    jobs = [("fleet", f"job-{number}") for number in range(200)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for job in jobs:
            job_metrics.JobMetrics()._count(job)
        kilobytes = (tracemalloc.get_traced_memory()[0] - before) / len(jobs) / 1024
    finally:
        tracemalloc.stop()
        for job in jobs:
            metrics.forget(*job)
    assert kilobytes < 6
