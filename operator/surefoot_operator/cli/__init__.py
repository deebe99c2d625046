"""Contains the `surefoot` command, one file for each subcommand."""
