"""Decides the next world: its members, size and restore point."""
