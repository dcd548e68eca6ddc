"""Backends, which execute forward passes: reference, CPU, fused CUDA kernels."""
