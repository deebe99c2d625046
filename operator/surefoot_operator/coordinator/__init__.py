"""Serves the agents of all jobs from soft state.

Agents send all of it again after a restart. `sessions`, `orders` and `desired_messages` decide, without
clock or I/O; `agent_server` carries lines and calls them.
"""
