"""Prefaults a memory server's memory at its start, reports readiness, and exports its metrics.

`python -m surefoot.memory_server.sidecar` is a container of the memory tier's pod. It never writes to a server that a job
uses, and nothing waits for it: without it, metrics and readiness are missing, but saves are not affected.
"""
