"""What a pass costs before it is run: its ops, what a device does in a second, and the time."""
