"""Tells what a rank's steps, pauses and pace are."""
