"""Configurations of the kernel that gathers a step's inputs, for the compile gate."""

from benchmarks.gpu.gate.launch_config import LaunchConfig
from kernels.layers import step_inputs


def _step_inputs(block_size: int, index: str) -> LaunchConfig:
    """Launch of the kernel. index: type of seats and positions."""
    return LaunchConfig(
        name=f"step inputs {index} block {block_size}",
        kernel=step_inputs.step_inputs_kernel,
        arguments={
            "table_tokens_ptr": "*i32",
            "table_blocks_ptr": "*i32",
            "seats_ptr": f"*{index}",
            "positions_ptr": f"*{index}",
            "token_ids_ptr": "*i64",
            "out_positions_ptr": "*i64",
            "slot_mapping_ptr": "*i64",
            "context_lens_ptr": "*i32",
            "row_blocks_ptr": "*i32",
            "tokens_stride": "i32",
            "blocks_stride": "i32",
            "row_stride": "i32",
            "width": "i32",
            "num_tokens": "i32",
            "num_token_programs": "i32",
            "num_parts": "i32",
        },
        constants={"BLOCK_SIZE": block_size, "TOKENS": step_inputs.TOKENS, "BLOCKS": step_inputs.BLOCKS},
        num_warps=step_inputs.NUM_WARPS,
        wide_loads=False,  # rows of a table have any width, and the table is small
    )


STEP_INPUTS = (_step_inputs(16, "i32"), _step_inputs(24, "i32"), _step_inputs(16, "i64"))
