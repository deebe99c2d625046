"""Connects a trainer and its agent on one machine."""
