"""Watches the cluster, and converts its objects to the observations that plans read.

All jobs share one watch of nodes, pods and memory servers: one for each job would load the API server a thousandfold.
"""
