"""CUDA: fused layers, Triton kernels, passes captured as CUDA graphs on static buffers.

Everything that changes from pass to pass is read from device memory, also the addresses of the
keys, so that one capture serves all canvases, lengths and blocks.
"""
