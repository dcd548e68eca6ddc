"""Training: data, objective, loop and recipes."""
