"""Warms a holder's memory at start, reports readiness, exports its metrics.

`python -m surefoot.memory_server.sidecar`; a container of the memory tier's pod. It never writes to a server that a job
uses, and nothing waits for it: a companion that is gone costs figures and readiness, no save.
"""
