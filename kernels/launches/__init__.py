"""Launches of kernels as inputs of the compiler: recorded, and compiled ahead on all cores."""
