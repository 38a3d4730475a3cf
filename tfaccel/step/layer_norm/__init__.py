"""Layer normalization by tfaccel's own GPU kernels (norm.py), and where it is used (choose.py)."""
