"""Execution as on an accelerator, on a CPU: by the kernels' torch references, or by the kernels in the interpreter."""
