"""A bias and GELU by tfaccel's own GPU kernels (gelu.py), and where they are used (choose.py)."""
