"""Serves the agents of all jobs from soft state.

Agents report everything again after a restart. `sessions`, `conversations` and `desired_messages` decide, without clock or
I/O; `agent_server` owns the connections and calls them.
"""
