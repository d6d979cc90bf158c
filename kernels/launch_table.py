"""Every configuration in which a kernel is launched, as the compile gate compiles it.

A new kernel adds its configurations here, each with the numbers its wrapper would choose for real model shapes.
"""

from kernels import block_copy
from kernels.launch_config import LaunchConfig

BLOCK_COPIES = (
    LaunchConfig(
        name="copy blocks",
        kernel=block_copy.copy_kernel,
        arguments={
            "source_ptr": "*i64",
            "destination_ptr": "*i64",
            "table_ptr": "*i64",
            "num_words": "i32",
            "num_groups": "i32",
            "num_chunks": "i32",
        },
        constants={"CHUNK": block_copy.CHUNK_WORDS},
        divisible_by_16=("num_words",),
        num_warps=block_copy.NUM_WARPS,
        num_stages=1,
    ),
)

LAUNCHES: tuple[LaunchConfig, ...] = BLOCK_COPIES
