"""Blocks: copies and swaps of whole blocks, and writes of single tokens."""
