"""Defines the Platform protocol and implements it on Kubernetes and on one machine."""
