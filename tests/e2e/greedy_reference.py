"""Reference for greedy outputs: at each position the token that `transformers` finds most likely there.

Each token is judged behind the given ones before it, so an output that is right at every position is the model's own,
and one forward pass tells.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tests.equality import assert_equal_greedy


@torch.inference_mode()
def assert_greedy(
    model: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], num_tokens: int
) -> None:
    """Assert that all outputs have `num_tokens` and are the model's; near ties are cut, printed and rare."""
    tokens, margins = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == num_tokens
        logits = model(torch.tensor([[*prompt, *output[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
        best = logits.float().topk(2)
        tokens.append(best.indices[:, 0].tolist())
        margins.append((best.values[:, 0] - best.values[:, 1]).tolist())
    assert_equal_greedy(tokens, margins, outputs)
