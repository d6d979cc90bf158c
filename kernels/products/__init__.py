"""Matrix products of an accelerator whose weights have 8 or 4 bits: quantisers, torch references, Triton kernels."""
