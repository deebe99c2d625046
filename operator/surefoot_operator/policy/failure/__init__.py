"""Detects failures, attributes them and limits restarts."""
