"""The agent's line to its coordinator, and what it does at its request or without a leader."""
