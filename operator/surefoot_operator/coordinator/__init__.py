"""The operator's side of the conversation with agents. Soft state only: whatever is known here, agents say again.

`sessions`, `orders` and `desired_messages` decide, without clock or I/O; `agent_server` carries lines and calls them.
"""
