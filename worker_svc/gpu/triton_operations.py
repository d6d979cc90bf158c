"""The Triton kernels as a bundle of operations, for a CUDA device, or for Triton's interpreter on any device.

The only file of the worker that needs Triton; callers check for it before they import this.
"""

from kernels.attention import cascade_attention, cascade_plan, decode_attention, decode_plan, prefill_attention
from kernels.blocks import block_copy, block_swap
from kernels.layers import activations, norms, rotary_write, step_inputs
from kernels.products import int4_product, row_quantising
from kernels.sampling import logit_penalties, token_choice
from kernels.sampling.sampling_operations import sampling_operations
from worker_svc.operations import Operations

OPERATIONS = Operations(
    step_inputs=step_inputs.step_inputs,
    rms_norm=norms.rms_norm,
    layer_norm=norms.layer_norm,
    gated_activation=activations.gated_activation,
    rotate_and_write=rotary_write.rotate_and_write,
    fill_decode_plan=decode_plan.fill_plan,
    decode_attention=decode_attention.decode_attention,
    fill_cascade_plan=cascade_plan.fill_cascade_plan,
    cascade_attention=cascade_attention.cascade_attention,
    prefill_attention=prefill_attention.prefill_attention,
    quantise_rows=row_quantising.quantise_rows,
    int4_product=int4_product.int4_product,
    copy_by_table=block_copy.copy_by_table,
    swap_blocks=block_swap.swap_blocks,
    sampling=sampling_operations(token_choice.choose_tokens, logit_penalties.penalise),
)
