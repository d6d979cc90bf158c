"""Measurements: each module is a program, run as `python -m benchmarks.NAME`; results are in `results/`."""
