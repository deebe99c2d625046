"""Reasons, conditions and labels: every name that a person may grep for, once."""

from __future__ import annotations

# Conditions of a TrainingJob
SUSPENDED = "Suspended"
PODS_SCHEDULED = "PodsScheduled"
RUNNING = "Running"
RECOVERING = "Recovering"
RESIZING = "Resizing"
CHECKPOINT_PROTECTED = "CheckpointProtected"
SPEC_REFUSED = "SpecRefused"
COMPLETE = "Complete"
FAILED = "Failed"

# Event reasons
WORLD_CLAIMED = "WorldClaimed"
WORLD_COMMITTED = "WorldCommitted"
WORKER_LOST = "WorkerLost"
TRAINER_FAILED = "TrainerFailed"
WORKER_CREATED = "WorkerCreated"
RESTART_LIMIT = "RestartLimitReached"
RESTORED = "Restored"
HOLDER_GIVEN_UP = "HolderGivenUp"
CHECKPOINT_LOST = "CheckpointLost"
CHECKPOINT_BAD = "CheckpointBad"
CHECKPOINT_STALLED = "CheckpointStalled"
PROTECTED = "CheckpointProtected"
UNPROTECTED = "CheckpointUnprotected"
TIER_FAILED = "TierFailed"
CHECKPOINT_PROMOTED = "CheckpointPromoted"
JOB_REFUSED = "JobRefused"
JOB_COMPLETE = "JobComplete"
JOB_FAILED = "JobFailed"
