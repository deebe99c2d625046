"""Allocates one agent's staging memory and tracks the saves in it."""
