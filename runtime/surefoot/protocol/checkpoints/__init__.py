"""Decides which saves make a checkpoint, and which may go.

Pure rules on the records of rank saves: operator, agents and programs without an operator decide by the same ones, so
that none deletes what another counts on.
"""
