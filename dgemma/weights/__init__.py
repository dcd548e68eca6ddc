"""Checkpoints: files, tensor names, strict loading, saving, quantization, LoRA, random weights."""
