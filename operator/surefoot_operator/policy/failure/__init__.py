"""Detects failures, finds their cause and limits restarts."""
