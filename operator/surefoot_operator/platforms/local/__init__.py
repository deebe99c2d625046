"""Implements the Fabric protocol on one machine: nodes are process groups.

`run_folder` is the base (little is imported: a node starts in a moment); `platform` stores job and status, and is the
operator's side; `node_process` plays the kubelet; `local_nodes` owns the node groups for
`surefoot local`.
"""
