"""Quantized weight formats: values with scales, and modules that hold them."""
