"""Optimizer states of fewer bytes than float32."""
