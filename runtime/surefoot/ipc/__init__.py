"""What a trainer and its agent say to each other on one machine."""
