"""Measurements: each is a program, run as `python -m benchmarks.ROOM.NAME`; results are in `results/`."""
