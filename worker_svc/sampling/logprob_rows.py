"""Converts log-probabilities from tensors on the host to the form of a step's result. Knows no seats."""

from collections.abc import Sequence

from common.step import LogprobRows
from kernels.sampling.sampling import TokenLogprobs


def logprob_rows(logprobs: TokenLogprobs, num_tokens: Sequence[int], num_top: Sequence[int]) -> list[LogprobRows]:
    """First num_tokens[i] tokens of each row of `logprobs`, each with the row's num_top[i] most likely tokens."""
    own, ranks = logprobs.logprobs.tolist(), logprobs.ranks.tolist()
    top_token_ids, top_logprobs = logprobs.top_token_ids.tolist(), logprobs.top_logprobs.tolist()
    return [
        LogprobRows(
            logprobs=own[row][:count],
            ranks=ranks[row][:count],
            num_top=len(top_token_ids[row][:most]),
            top_token_ids=top_token_ids[row][:most] * count,
            top_logprobs=top_logprobs[row][:most] * count,
        )
        for row, (count, most) in enumerate(zip(num_tokens, num_top, strict=True))
    ]


def span_rows(logprobs: TokenLogprobs, rows: slice, num_top: int) -> LogprobRows:
    """Join rows of one token each; each token has the `num_top` most likely tokens of its row."""
    top_token_ids = logprobs.top_token_ids[rows, :num_top]
    return LogprobRows(
        logprobs=logprobs.logprobs[rows, 0].tolist(),
        ranks=logprobs.ranks[rows, 0].tolist(),
        num_top=top_token_ids.shape[1],
        top_token_ids=top_token_ids.reshape(-1).tolist(),
        top_logprobs=logprobs.top_logprobs[rows, :num_top].reshape(-1).tolist(),
    )
