"""What a run's model does with each image of a split: see run.py."""
