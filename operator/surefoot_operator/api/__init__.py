"""Defines the TrainingJob: spec and status as frozen dataclasses, and their parser."""
