"""The model of scripted workers, as pure functions: what a test expects is computed, not recorded.

Drawn samples count: sample i goes up by i + 1. Beams choose among candidates whose log-probabilities are a fixed
pattern, so that several live on, fork and end. All numbers are eighths, which float32 holds and adds exactly.
"""

from collections.abc import Sequence

VOCAB_SIZE = 100_000
EOS = 99_999

_NUM_LIKELY = 64  # tokens behind the last one that can be candidates, beside EOS


def next_token(token_id: int, sample_index: int) -> int:
    """Token that sample `sample_index` draws after `token_id`."""
    return (token_id + 1 + sample_index) % VOCAB_SIZE


def counted(start: int, num_tokens: int, sample_index: int = 0) -> list[int]:
    """The output of a sample behind a prompt that ends with `start`."""
    return [(start + (i + 1) * (sample_index + 1)) % VOCAB_SIZE for i in range(num_tokens)]


def logprob(last: int, token_id: int) -> float:
    """Log-probability of `token_id` after `last`, from -8 to -1/8; the end is never unlikely."""
    if token_id == EOS:
        return -(last * 7 % 16 + 1) / 8
    return -(((last * 31 + token_id * 17 + (last * token_id) % 13) % 64) + 1) / 8


def rank(last: int, token_id: int) -> int:
    return (last + token_id) % 50 + 1


def candidates(last: int, num_wanted: int, *, allowed: Sequence[int], held_back: Sequence[int]) -> list[int]:
    """The most likely next tokens, best first, then what is not allowed; of equals the lower id comes first.

    `held_back` are not allowed either; without `allowed` all others are.
    """
    likely = [(last + 1 + i) % VOCAB_SIZE for i in range(_NUM_LIKELY)]
    tokens = sorted({EOS, *allowed, *likely})
    barred = (set(tokens) - set(allowed) if allowed else set()) | set(held_back)
    return sorted(tokens, key=lambda token: (token in barred, -logprob(last, token), token))[:num_wanted]


def candidate_logprobs(
    last: int, token_ids: Sequence[int], *, allowed: Sequence[int], held_back: Sequence[int]
) -> list[float]:
    """Log-probabilities of `candidates`; -inf for tokens that are not allowed."""
    return [
        float("-inf") if token in held_back or (allowed and token not in allowed) else logprob(last, token)
        for token in token_ids
    ]
