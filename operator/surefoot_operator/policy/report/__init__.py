"""Derives the conditions, events and time accounting that users read of a job."""
