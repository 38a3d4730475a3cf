"""Proof that a loader's epochs have every example as often as they should."""
