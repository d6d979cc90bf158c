"""Checks of the machine code of every kernel, compiled without a GPU."""
