"""The operator's side of the conversation with agents. Soft state only: whatever is known here, agents say again.

`sessions`, `orders` and `speech` decide, without clock or I/O; `server` carries lines and calls them.
"""
