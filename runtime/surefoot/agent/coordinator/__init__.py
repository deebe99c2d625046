"""Connects the agent to the coordinator and carries out its requests."""
