"""Every configuration in which a kernel is launched, as the compile gate compiles it.

A new kernel adds its configurations here, each with the numbers its wrapper would choose for real model shapes.
"""

from kernels.launch_config import LaunchConfig

LAUNCHES: tuple[LaunchConfig, ...] = ()
