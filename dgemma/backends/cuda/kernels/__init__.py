"""Triton kernels for NVIDIA GPUs. Each is chosen by the op it serves, whose file defines it.

Imported only where Triton is present, but for `cuts`, which is data. Every kernel is deterministic:
no float is ever added in an order that depends on timing.
"""
