"""Every file of a source looked at once: which cannot be trained on, and why."""
