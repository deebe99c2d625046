"""How trainers are started: forked from a warm process, or run by exec."""
