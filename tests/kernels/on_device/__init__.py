"""Tests of the Triton kernels: on a GPU where there is one, else in Triton's interpreter."""
