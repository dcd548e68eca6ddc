"""Triton kernels for NVIDIA GPUs; imported only where Triton is installed.

Every kernel is deterministic: no float is ever added in an order that depends on timing.
"""
