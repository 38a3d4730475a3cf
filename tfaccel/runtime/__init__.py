"""Devices, replicas and workers: everything that is set up before a model is built."""
