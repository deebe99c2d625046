"""Decides how a job completes, idles, suspends and is cleaned up."""
