"""Renders the report page, which shows the history of a job as one HTML file."""
