"""Recipes: what this repository trains, and from what."""
