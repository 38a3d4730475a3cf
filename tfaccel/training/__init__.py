"""What happens around the steps of `fit`: callbacks, checkpoints, resuming, records."""
