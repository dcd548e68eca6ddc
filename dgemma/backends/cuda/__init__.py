"""CUDA: fused layers, Triton kernels, passes captured as CUDA graphs on static buffers.

Everything that changes from pass to pass is read from device memory, also where the keys lie, so
that one capture serves all rows, lengths and blocks. Where there are no kernels the same work is
done by definition, which is how it is tested.
"""
