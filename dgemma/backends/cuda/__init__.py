"""CUDA backend: fused layers, Triton kernels, passes captured as CUDA graphs on static buffers.

Everything that changes between passes is read from device memory, including the addresses of the
keys, so that one capture serves all canvases, lengths and blocks.
"""
