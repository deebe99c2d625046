"""Checks what surefoot needs: here, on a cluster, in a tier."""
