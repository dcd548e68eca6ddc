"""The engine behind HTTP, in OpenAI's shapes: routes, wire types, scheduling, limits and keys."""
