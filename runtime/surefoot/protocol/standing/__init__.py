"""Says where ranks of a training stand, and which one stands elsewhere."""
