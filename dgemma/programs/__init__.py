"""Programs: features that need several tasks of the engine, as generators that yield tasks."""
