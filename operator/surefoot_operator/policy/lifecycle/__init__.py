"""How a job ends, rests and is cleaned up."""
