"""Serves torchrun's rendezvous from a coordinator's epochs."""
