"""Memory of the largest step on a CPU, without weights and pool: rows of its pass, and logits while tokens are drawn.

Knows the shapes of a model, and no allocations.
"""

import torch

from worker_svc.cpu.runner import MAX_PROMPT_LOGITS
from worker_svc.model.config import ModelConfig

# Copies of a row's logits while tokens are drawn: as floats, sorted, and as cumulative sums.
_COPIES_OF_LOGITS = 3


def step_buffer_bytes(config: ModelConfig, dtype: torch.dtype, *, num_tokens: int, num_rows: int) -> int:
    """Bytes for a step of `num_tokens` tokens that needs `num_rows` rows of logits, for samples or prompts."""
    hidden, inner = config.hidden_size, config.intermediate_size
    numel = sum(
        (
            config.embed_dim,  # embedded
            5 * hidden,  # projected, normed, attention_out, mlp_out, and final or layer_out
            config.query_size + 2 * config.kv_size,  # qkv
            config.query_size,  # attended
            (3 if config.gated_mlp else 1) * inner,  # gate_up and inner
            hidden + 2 * config.query_size,  # of wanted tokens: residual, queries and attended
        )
    )
    logits = config.vocab_size * (dtype.itemsize + _COPIES_OF_LOGITS * torch.float32.itemsize)
    with_logits = min(num_tokens, max(num_rows, MAX_PROMPT_LOGITS // config.vocab_size))
    return num_tokens * numel * dtype.itemsize + with_logits * logits
