"""Defines the saved bytes: streams, digests, manifests, plain values (docs/format.md).

No torch: the agent hashes and describes what trainers staged, and tensors become boxes and names before they get here.
"""
