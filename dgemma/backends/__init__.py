"""Executes forward passes: a reference over the modules, a CPU layout, fused CUDA kernels."""
