"""Operations of the accelerator's runner beside torch's products: one bundle of kernels or of their references.

`torch_operations` runs on any device, `triton_operations` needs Triton. The docstring of a reference defines the
operation; arguments are passed by position. No kernel waits for the device, but a reference may.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.attention.cascade_reference import CascadePlan
from kernels.attention.decode_reference import DecodePlan
from kernels.attention.prefill_reference import PrefillPlan
from kernels.attention.shape import Attended, ScoreRule
from kernels.layers.layer_ops import Activation, Rotary
from kernels.layers.step_inputs_reference import SeatTables, StepInputs
from kernels.products.fp8_product import Fp8Matrix
from kernels.products.int4_matrix import Int4Matrix
from kernels.sampling.sampling_operations import SamplingOperations

RmsNorm = Callable[[Tensor, Tensor | None, float, Tensor | None], Tensor]
LayerNorm = Callable[[Tensor, Tensor | None, Tensor | None, float, Tensor | None], Tensor]
RotateAndWrite = Callable[[Tensor, Tensor, Tensor, Rotary | None, Tensor, Tensor, Tensor], None]
DecodeAttention = Callable[[Tensor, Tensor, Tensor, DecodePlan, ScoreRule, bool, Tensor | None], Attended]
CascadeAttention = Callable[[Tensor, Tensor, Tensor, CascadePlan, ScoreRule, Tensor | None], Attended]
PrefillAttention = Callable[[Tensor, Tensor, Tensor, PrefillPlan, ScoreRule, bool, Tensor | None], Attended]
QuantiseRows = Callable[[Tensor], Fp8Matrix]
Int4Product = Callable[[Tensor, Int4Matrix, Tensor | None, Tensor], Tensor]

CopyByTable = Callable[[Tensor, Tensor, Tensor, int], None]
SwapBlocks = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """One implementation of the operations; all implementations have the same signatures."""

    step_inputs: Callable[[SeatTables, Tensor, Tensor, int, StepInputs], None]
    rms_norm: RmsNorm
    layer_norm: LayerNorm
    gated_activation: Callable[[Tensor, Activation], Tensor]
    rotate_and_write: RotateAndWrite
    fill_decode_plan: Callable[[DecodePlan], None]
    decode_attention: DecodeAttention
    fill_cascade_plan: Callable[[CascadePlan], None]
    cascade_attention: CascadeAttention
    prefill_attention: PrefillAttention
    quantise_rows: QuantiseRows
    int4_product: Int4Product
    copy_by_table: CopyByTable
    swap_blocks: SwapBlocks
    sampling: SamplingOperations
