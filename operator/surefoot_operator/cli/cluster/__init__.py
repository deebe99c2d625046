"""Reads and changes a cluster's TrainingJobs with a person's own rights."""
