"""Thousands of workers in virtual time: the real scheduler, router and placement code with simulated processes."""
