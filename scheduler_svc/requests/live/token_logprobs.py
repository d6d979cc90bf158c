"""Log-probabilities in the form for clients, from a worker's rows. Pure."""

from collections.abc import Iterable

from common.step import LogprobRows
from quire.v1 import inference_pb2 as pb


def token_logprobs(token_ids: Iterable[int], rows: LogprobRows) -> list[pb.TokenLogprobs]:
    """Log-probabilities in the form for clients, one for each token."""
    return [row_logprobs(token_id, rows, i) for i, token_id in enumerate(token_ids)]


def row_logprobs(token_id: int, rows: LogprobRows, i: int) -> pb.TokenLogprobs:
    """Log-probability of one token, from row `i`."""
    k = rows.num_top
    return pb.TokenLogprobs(
        token_id=token_id,
        logprob=rows.logprobs[i],
        rank=rows.ranks[i],
        top_token_ids=rows.top_token_ids[i * k : (i + 1) * k],
        top_logprobs=rows.top_logprobs[i * k : (i + 1) * k],
    )
