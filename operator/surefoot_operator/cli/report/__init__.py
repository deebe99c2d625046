"""Makes the report page: a job's history as one HTML file."""
