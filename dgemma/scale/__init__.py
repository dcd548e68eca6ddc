"""Several replicas of the server, on Ray Serve. Only the command line imports it."""
