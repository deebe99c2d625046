"""Implements the Fabric protocol on one machine: nodes are process groups.

`run_folder` and `run_records` are the base (standard library only: a node starts in a moment); `job_store` stores job
and status; `platform` is the operator's side; `node_process` plays the kubelet; `local_nodes` owns the node groups for
`surefoot local`.
"""
