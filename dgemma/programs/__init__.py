"""Programs: features that take several tasks of the engine, as generators that yield them."""
