"""Number of torch's CPU threads, and how long they spin. Import this before torch, in the worker's process alone.

torch reads the environment once, when it is loaded. Variables that are set already are kept.
"""

import os

from quire import machine

# Spins of a thread that has finished its part of an operation, before it sleeps. Meanwhile the native kernels' threads
# and the scheduler need its core. The default of 300,000 takes 10 ms on a Zen 3 core, this 0.16 ms.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# By default torch takes the number of the machine's cores, whatever CPU quota its container has.
os.environ.setdefault("OMP_NUM_THREADS", str(machine.num_processors()))
