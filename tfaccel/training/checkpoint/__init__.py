"""The state of training on disk: whole or not there, checked when it is read, and rotated."""
