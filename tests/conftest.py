"""Tiny models are fastest on one thread, and do not fight the other core for it."""

import torch

torch.set_num_threads(1)
