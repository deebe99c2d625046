"""Implements `surefoot local`: runs a TrainingJob on this machine."""
