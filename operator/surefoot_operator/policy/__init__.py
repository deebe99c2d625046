"""Contains the operator's decisions as pure functions.

Pure functions on frozen values; time is an argument, every plan has a reason.
"""
