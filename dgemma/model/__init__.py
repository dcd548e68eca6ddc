"""The Gemma stack: one set of weights, run causally or over a canvas."""
