"""Watches the cluster, and translates what it sees for decisions.

Jobs share one view of nodes, pods and holders: a watch a job asked the API server the same thing a thousand times.
"""
