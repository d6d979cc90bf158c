"""How long torch's threads spin on a CPU. Import it before torch, in the worker's `__main__` alone.

It is read once, when torch is loaded; what the environment says already is left as it is.
"""

import os

# A thread that has done its part of a product spins this often before it sleeps: as long as a step has between two
# products, but not into the time between steps, which belongs to the scheduler where cores are few. The default of
# 300,000 burns 10 ms there on a Zen 3 core, this 1.6 ms.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
