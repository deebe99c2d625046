"""Whether the operator is alive and what it measures of itself."""
