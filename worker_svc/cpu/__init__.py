"""CPU runner: packed weights, and kernels that read the KV pool in place."""
