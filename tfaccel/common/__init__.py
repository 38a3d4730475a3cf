"""Helpers for every room: errors, checks, tables, files and paths."""
