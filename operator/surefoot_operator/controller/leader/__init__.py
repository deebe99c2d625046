"""Elects which replica of the operator leads."""
