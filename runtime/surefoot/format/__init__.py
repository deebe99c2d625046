"""What saved bytes look like: streams, digests, manifests, plain values. The exact forms stand in docs/format.md.

No torch: the agent hashes and describes what trainers staged, and tensors become boxes and names before they get here.
"""
