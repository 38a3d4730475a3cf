"""Checks every file of a source: which cannot be trained on, and why."""
