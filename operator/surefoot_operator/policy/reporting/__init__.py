"""What people are told of a job: conditions and events."""
