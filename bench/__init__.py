"""Surefoot beside its peers, in one run on one machine: `python -m bench checkpoint`, `python -m bench checkpoint --quick`. docs/benchmarks.md reads it.

`__main__` runs the sections one after the other and writes `build/bench/checkpoint.json` and its picture. Each system
is measured by a worker process of its own, so that its warnings, threads and aborts end with it.
"""
