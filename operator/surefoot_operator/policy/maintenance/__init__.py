"""Maintains the tiers of a training job: copies, uploads, retention, save intervals."""
