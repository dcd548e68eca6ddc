"""Functions for the built-in model's training, written by a larger model."""
