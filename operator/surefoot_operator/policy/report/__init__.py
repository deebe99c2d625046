"""Reports a job to people: conditions and events."""
