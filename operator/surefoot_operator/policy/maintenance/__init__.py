"""Maintains a running job's tiers: copies, promotion, retention, intervals."""
