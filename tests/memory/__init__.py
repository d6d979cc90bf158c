"""The memory manager proved: who holds which block, who writes it, and that what comes back is what went away."""
