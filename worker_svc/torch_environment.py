"""How torch's threads wait and its memory lies, on a CPU. Import it before torch, in the worker's `__main__` alone.

Both are read once, when they are loaded; what the environment says already is left as it is.
"""

import os

# A thread that has done its part of a product spins this often before it sleeps: as long as a step has between two
# products, but not into the time between steps, which belongs to the scheduler where cores are few.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# Weights and KV pool in huge pages, where the system leaves that to programs: fewer misses when they are read, and a
# process that is killed is gone sooner.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
