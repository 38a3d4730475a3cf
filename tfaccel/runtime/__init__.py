"""Devices, replicas and workers: what is settled before a model is built, and how they agree."""
