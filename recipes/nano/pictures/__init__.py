"""Pictures that teach nano to see: glyphs, composition, the tower's training and its package."""
