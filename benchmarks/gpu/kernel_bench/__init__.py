"""The parts of `benchmarks.gpu.kernels`: how kernels are timed, on what, and what is shown of it."""
