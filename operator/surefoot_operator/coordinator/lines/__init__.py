"""Holds the lines of agents: let in, encrypted, limited, and written to.

What all agents of a job hear is encoded once here, and a slow line delays no other.
"""
