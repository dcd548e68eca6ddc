"""Constrained decoding of canvases: JSON Schema, regex, Lark grammars, choices, tool calls."""
