"""Whole blocks: copied, swapped, and written token by token."""
