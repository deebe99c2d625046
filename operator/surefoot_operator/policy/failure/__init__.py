"""What counts as a failure, whose it is, and how often a job may restart."""
