"""Answers what the API server asks before it accepts a change.

Jobs that are stored, and evictions of their workers.
"""
