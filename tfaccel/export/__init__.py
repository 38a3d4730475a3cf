"""A trained model to files that serve it, and proof that they answer alike."""
