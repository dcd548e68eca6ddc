"""Compiling the objective: the pass and the guess become one graph each, with fixed shapes."""

import torch

from dgemma.train.objective import Objective


def compiled(objective: Objective) -> Objective:
    """Compile an objective's two passes in place; the first step then takes a minute."""
    objective.losses = torch.compile(objective.losses, dynamic=False)  # type: ignore[method-assign]
    objective.guess = torch.compile(objective.guess, dynamic=False)  # type: ignore[method-assign]
    return objective
