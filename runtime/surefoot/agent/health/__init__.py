"""Finds faults of this agent's node; no torch."""
