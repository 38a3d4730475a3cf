"""Activation checkpointing: parts of the forward pass are computed again in the backward pass."""
