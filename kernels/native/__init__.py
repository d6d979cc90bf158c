"""The CPU's kernels: native code that is compiled at first use, and the torch references that need no compiler."""
