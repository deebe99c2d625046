"""The `surefoot` command: `main` dispatches, one file a command, and pure parts (faults, ledger, report) beside them."""
