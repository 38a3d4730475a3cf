"""Commands that check a machine, a script, an experiment or a run, and report what they find."""
