"""HTTP API: routes, request schemas, response formats, limits, authentication."""
