"""The torch references as a bundle of operations, for any device."""

from kernels.attention import cascade_reference, decode_reference, prefill_reference
from kernels.blocks import kv_blocks
from kernels.layers import layer_ops, step_inputs_reference
from kernels.products import fp8_product, int4_matrix
from kernels.sampling import sampling_operations
from worker_svc.operations import Operations

OPERATIONS = Operations(
    step_inputs=step_inputs_reference.step_inputs,
    rms_norm=layer_ops.rms_norm,
    layer_norm=layer_ops.layer_norm,
    gated_activation=layer_ops.gated_activation,
    rotate_and_write=layer_ops.rotate_and_write,
    fill_decode_plan=decode_reference.fill_plan,
    decode_attention=decode_reference.decode_attention,
    fill_cascade_plan=cascade_reference.fill_cascade_plan,
    cascade_attention=cascade_reference.cascade_attention,
    prefill_attention=prefill_reference.prefill_attention,
    quantise_rows=fp8_product.quantise_rows,
    int4_product=int4_matrix.int4_product,
    copy_by_table=kv_blocks.copy_by_table,
    swap_blocks=kv_blocks.swap_blocks,
    sampling=sampling_operations.REFERENCES,
)
