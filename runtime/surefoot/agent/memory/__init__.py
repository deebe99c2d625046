"""Staging memory of one agent: what it gives, what is wanted, what is saved in it."""
