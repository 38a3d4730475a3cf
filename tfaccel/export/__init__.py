"""Exports a trained model to files that can be served, and checks that they answer alike."""
