"""One file per op: the fast path beside the few lines that define it."""
