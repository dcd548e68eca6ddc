"""Evaluation: tasks with known answers, run by diffusion and by AR mode of the same weights."""
