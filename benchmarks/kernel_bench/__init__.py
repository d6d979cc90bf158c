"""The parts of `benchmarks.kernels`: how kernels are timed, on what, and what is shown of it."""
