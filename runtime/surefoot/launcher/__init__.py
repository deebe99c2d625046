"""Starts trainers: forked from a warm fork server, or by exec."""
