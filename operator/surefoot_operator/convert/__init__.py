"""Converts training jobs of other systems to TrainingJobs."""
