"""The pure core: sequences, blocks, and who computes what next. The standard library and nothing else."""
