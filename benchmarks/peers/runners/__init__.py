"""One small program for each peer, run by the Python of that peer's environment."""
