"""One machine instead of a cluster: a node is a process group, the API server a run folder.

`folder`, `records` and `life` are the ground (no framework: a node leader starts in a moment); `store`
keeps job and status; `fabric` is the operator's side; `node` plays the kubelet; `machine` owns the node groups and is
what `surefoot local` uses.
"""
