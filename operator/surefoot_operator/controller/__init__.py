"""Contains the composition roots that assemble an operator process."""
