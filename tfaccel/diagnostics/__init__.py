"""Commands that examine a machine, a script, an experiment or a run, and report what they find."""
