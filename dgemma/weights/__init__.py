"""Checkpoints: the name table, strict loading, saving, random weights, and where to find them.

Only `load` and `random` make models; nothing here knows tokens, sampling or requests.
"""
