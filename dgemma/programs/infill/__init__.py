"""Infill: complete a text with holes without changing a byte outside them."""
