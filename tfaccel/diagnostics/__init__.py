"""Commands that look at a machine, a script, an experiment or a run, and say what they find."""
