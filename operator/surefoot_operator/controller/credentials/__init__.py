"""Secrets, certificates and tokens: made, kept, checked."""
