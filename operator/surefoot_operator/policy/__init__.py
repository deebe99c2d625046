"""Decisions: `plan(Observed) -> Plan`. Pure functions on frozen values; time is an argument, every plan has a reason."""
