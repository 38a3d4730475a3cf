"""The `tfaccel` command: its flags, its commands, its help."""
