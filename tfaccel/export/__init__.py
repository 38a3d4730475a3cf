"""Exports a trained model to files for a server, and checks that they give the same answers."""
