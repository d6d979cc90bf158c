"""The models that the paper served: what a token takes, how many fit, and what a step costs (Table 1).

Only OPT-13B's costs are fitted to measurements. Those of the two larger models are its costs, scaled by what each of
their GPUs reads and computes; the exchange between GPUs costs nothing in that.
"""

from dataclasses import dataclass

from benchmarks.paper.cost_model import CostModel, fitted
from benchmarks.paper.published import ModelName

GIB = 1 << 30
A100_40_BYTES_PER_S, A100_80_BYTES_PER_S = 1.555e12, 2.039e12


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Served model in float16, with keys and values of all heads."""

    name: ModelName
    hidden_size: int
    num_layers: int
    num_parameters: float
    num_gpus: int
    bytes_per_s: float  # that one GPU reads
    weight_bytes: float
    kv_gib: float

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.hidden_size * self.num_layers * 2

    @property
    def num_slots(self) -> int:
        """Tokens that fit into the KV memory."""
        return int(self.kv_gib * GIB) // self.bytes_per_token

    @property
    def costs(self) -> CostModel:
        """Scale OPT-13B's costs by bytes read of weights and of KV, and by operations, each on one GPU."""
        base, own = fitted(), MODELS["opt-13b"]
        slower = own.bytes_per_s / self.bytes_per_s / self.num_gpus
        weights = self.weight_bytes / own.weight_bytes * slower
        kv = self.bytes_per_token / own.bytes_per_token * slower
        operations = self.num_parameters / own.num_parameters / self.num_gpus
        kv_per_gpu = self.bytes_per_token / own.bytes_per_token / self.num_gpus
        return CostModel(
            step_s=base.step_s * weights,
            sequence_s=base.sequence_s * kv,
            prompt_token_s=base.prompt_token_s * operations,
            swap_token_s=base.swap_token_s * kv_per_gpu,
            swap_block_s=base.swap_block_s * self.num_layers / own.num_layers,
        )


MODELS: dict[ModelName, ServedModel] = {
    "opt-13b": ServedModel(
        name="opt-13b",
        hidden_size=5120,
        num_layers=40,
        num_parameters=13e9,
        num_gpus=1,
        bytes_per_s=A100_40_BYTES_PER_S,
        weight_bytes=26e9,
        kv_gib=12,
    ),
    "opt-66b": ServedModel(
        name="opt-66b",
        hidden_size=9216,
        num_layers=64,
        num_parameters=66e9,
        num_gpus=4,
        bytes_per_s=A100_40_BYTES_PER_S,
        weight_bytes=132e9,
        kv_gib=21,
    ),
    "opt-175b": ServedModel(
        name="opt-175b",
        hidden_size=12288,
        num_layers=96,
        num_parameters=175e9,
        num_gpus=8,
        bytes_per_s=A100_80_BYTES_PER_S,
        weight_bytes=346e9,
        kv_gib=264,
    ),
}
