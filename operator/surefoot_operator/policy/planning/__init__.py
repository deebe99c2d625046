"""Makes the plan of one reconcile and checks its invariants."""
