"""The Gemma stack: one set of weights, run causally (commit) or over a canvas (denoise)."""
