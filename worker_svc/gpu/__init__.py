"""The runner of an accelerator: few operations between the kernels, and waits only for answers."""
