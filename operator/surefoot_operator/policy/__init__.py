"""Contains the operator's decisions as pure functions.

Frozen values in, frozen values out; time is an argument, and every plan has a reason.
"""
