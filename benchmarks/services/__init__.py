"""Processes that benchmarks start, and the probes and traces that measure inside them."""
