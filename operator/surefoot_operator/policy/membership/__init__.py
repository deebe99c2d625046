"""Decides the next membership: its members, size and restore point."""
