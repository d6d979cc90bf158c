"""The decoder: one model driven by its config, for all families."""
