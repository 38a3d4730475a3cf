"""Attention by cuDNN's flash kernels, in steps that XLA compiles for GPUs."""
