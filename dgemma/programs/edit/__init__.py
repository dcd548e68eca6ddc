"""Edit: change a text in place, only where an instruction or a correction requires it."""
