"""Ranks of a tensor-parallel group: processes that compute each pass together, led by rank 0, which is the worker."""
