"""Decides which saves make a checkpoint, where their copies go, and which may be deleted.

Pure rules on the records of rank saves. Operator, agents and programs without an operator share them, so that none
deletes a save that another relies on.
"""
