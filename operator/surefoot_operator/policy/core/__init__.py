"""Defines the basis of every decision: facts derived from a snapshot, actions, availability."""
