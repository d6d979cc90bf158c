"""Pinned prefixes: asked for, computed, kept, journaled."""
