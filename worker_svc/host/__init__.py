"""The CPU's forward pass: packed weights, and kernels that read the pool in place."""
