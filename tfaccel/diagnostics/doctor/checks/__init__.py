"""Checks: pure functions that turn facts into findings, each with a fix."""
