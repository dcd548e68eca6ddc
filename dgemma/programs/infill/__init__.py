"""Infill: a text with holes, completed without changing a byte outside them."""
