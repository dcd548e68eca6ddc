"""Edit: a text changed in place, only where an instruction or a correction needs it."""
