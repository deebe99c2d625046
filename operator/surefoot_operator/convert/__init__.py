"""Turns other systems' training jobs into TrainingJobs."""
