"""Everything that made nano, the built-in model: data, teacher, tokenizer, runs (HISTORY.md)."""
