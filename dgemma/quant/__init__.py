"""Quantized weight formats: values with scales, and modules with quantized weights."""
