"""Attention of other projects' kernels over the worker's pool, where they are installed and faster."""
