"""The runner of an accelerator: little between the kernels, and no waiting but for answers."""
