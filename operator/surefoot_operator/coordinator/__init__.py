"""Exchanges messages with the agents of all jobs; stores nothing.

After a restart of the operator, agents report everything again. `sessions`, `conversations` and `desired_messages`
decide without clock or I/O; `agent_channel` and `agent_server` own the connections and call them.
"""
