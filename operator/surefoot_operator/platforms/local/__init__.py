"""Implements the Platform protocol on one machine, where each node is a process group.

`run_folder` defines the files (with few imports, so that nodes start fast). `platform` is the operator's side and
stores job and status. `node_process` runs one node, in the kubelet's place. `local_nodes` owns all nodes for `surefoot
local`.
"""
