"""Contains what every decision builds on: facts derived from a snapshot, actions, availability."""
