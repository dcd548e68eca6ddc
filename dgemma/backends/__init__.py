"""Backends, which execute forward passes: reference, CPU forms of a model, fused CUDA kernels."""
