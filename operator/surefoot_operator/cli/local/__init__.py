"""Implements `surefoot local`, which runs a TrainingJob on this machine."""
