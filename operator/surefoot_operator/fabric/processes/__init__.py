"""Implements the Fabric protocol on one machine: nodes are process groups.

`run_folder` and `run_records` are the ground (no framework: a node leader starts in a moment);
`job_store` keeps job and status; `processes_fabric` is the operator's side; `node` plays the kubelet; `machine` owns
the node groups and is what `surefoot local` uses.
"""
