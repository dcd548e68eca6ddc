"""Weights laid out for CPU kernels: merged and packed linears, 8-bit integer linears."""
