"""The runner of a CPU: packed weights, and kernels that read the pool in place."""
