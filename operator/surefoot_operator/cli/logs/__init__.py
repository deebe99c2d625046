"""Shows and follows what trainers and agents wrote."""
