"""Evaluation: tasks with known answers, by diffusion and by AR of the same weights."""
