"""Depthwise convolutions by tfaccel's own GPU kernels (depthwise.py), and where (choose.py)."""
