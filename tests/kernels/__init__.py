"""Tests of the kernels, each against its definition."""
