"""Composition roots: what builds an operator out of its rooms and hands each its settings."""
