"""Tokens that end an answer: the ids of generation_config.json or config.json, else the tokenizer's own.

A tokenizer's `eos_token` that these ids leave out ends nothing, as in `transformers`: the start warns of it.
"""

from worker_svc.checkpoint.tokenizer_files import EndToken
from worker_svc.model.config import ModelConfig

_MOST_SHOWN = 60


def end_token_ids(config: ModelConfig, end_token: EndToken | None) -> tuple[int, ...]:
    """Ids that end an answer; none if neither the files nor the tokenizer have one that the model can give."""
    if config.eos_token_ids or end_token is None or end_token.token_id >= config.vocab_size:
        return config.eos_token_ids
    return (end_token.token_id,)


def left_out_warning(config: ModelConfig, end_token: EndToken | None) -> str | None:
    """Line about a token of the tokenizer that ends texts but no answer; None if there is none."""
    if end_token is None or end_token.token_id >= config.vocab_size:
        return None
    ends = end_token_ids(config, end_token)
    if end_token.token_id in ends:
        return None
    content = end_token.content if len(end_token.content) <= _MOST_SHOWN else f"{end_token.content[:_MOST_SHOWN]}…"
    return (
        f"the tokenizer's eos_token {content!r} ({end_token.token_id}) ends no answer, {_named(ends)}: "
        f"add {end_token.token_id} to eos_token_id in generation_config.json if the model ends its answers with it"
    )


def _named(token_ids: tuple[int, ...]) -> str:
    """Say which ids end one: "only 2 does", "only 2 and 5 do"."""
    if len(token_ids) == 1:
        return f"only {token_ids[0]} does"
    return f"only {', '.join(map(str, token_ids[:-1]))} and {token_ids[-1]} do"
