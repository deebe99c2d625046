"""Starts trainers: forked from a warm process, or by exec."""
