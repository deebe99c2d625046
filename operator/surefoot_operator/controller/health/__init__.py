"""Reports the operator's own health, logs and process metrics."""
