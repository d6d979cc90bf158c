"""How long torch's threads spin on a CPU. Import it before torch, in the worker's `__main__` alone.

It is read once, when torch is loaded; what the environment says already is left as it is.
"""

import os

# A thread that has done its part of an operation spins this often before it sleeps, while the native kernels' threads
# and the scheduler want its core. The default of 300,000 burns 10 ms on a Zen 3 core, this 0.16 ms.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
