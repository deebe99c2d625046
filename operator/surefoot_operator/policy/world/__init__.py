"""Which workers make up the next world, at what size, and from which checkpoint."""
