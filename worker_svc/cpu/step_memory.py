"""Memory of the largest step on a CPU beside weights and pool: rows of its pass, and logits while tokens are drawn.

It knows the shapes of a model, and nothing that is allocated.
"""

import torch

from worker_svc.cpu.runner import MAX_PROMPT_LOGITS
from worker_svc.model.config import ModelConfig

# Of a row's logits while tokens are drawn: as floats, sorted, and what they add up to.
_COPIES_OF_LOGITS = 3


def step_buffer_bytes(config: ModelConfig, dtype: torch.dtype, *, num_tokens: int, num_rows: int) -> int:
    """Bytes for a step of so many tokens, with so many rows that are sampled, or logits of prompts in their place."""
    hidden, inner = config.hidden_size, config.intermediate_size
    numel = sum(
        (
            config.embed_dim,  # embedded
            5 * hidden,  # projected, normed, attention_out, mlp_out, and final or layer_out
            config.query_size + 2 * config.kv_size,  # qkv
            config.query_size,  # attended
            (3 if config.gated_mlp else 1) * inner,  # gate_up and inner
            hidden + config.query_size,  # of wanted tokens: the residual, what was attended
        )
    )
    logits = config.vocab_size * (dtype.itemsize + _COPIES_OF_LOGITS * torch.float32.itemsize)
    with_logits = min(num_tokens, max(num_rows, MAX_PROMPT_LOGITS // config.vocab_size))
    return num_tokens * numel * dtype.itemsize + with_logits * logits
