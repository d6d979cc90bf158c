"""Attention over keys and values in blocks, and the plans that split its work."""
