"""Starts, watches and reaps the trainers of one agent."""
