"""Interfaces to the operating system: child processes, signals, memory limits and heartbeats."""
