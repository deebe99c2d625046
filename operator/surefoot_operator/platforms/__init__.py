"""Contains the Fabric protocol and its two implementations."""
