"""Proves that a loader gives every example as often as it should in each epoch."""
