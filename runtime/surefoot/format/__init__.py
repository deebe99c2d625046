"""Defines the saved bytes: streams, digests, manifests, plain values (docs/format.md).

It does not import torch, because the agent hashes and describes staged saves; callers pass tensors as names and boxes.
"""
