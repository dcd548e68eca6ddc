"""What narrows a canvas: grammars and schemas, holes and edits."""
