"""Ranks the next tokens of rows whose token the scheduler chooses, for beam search.

As in the beam search of `transformers`, edits (ids, bias, penalties) change the log-probabilities of the model, not its
logits, and the result is not normalised again. Three parts, as in `sampler`: pack, launch, and read the copies on the
host. The ranks of a row do not depend on the rest of the batch. Knows nothing of beams.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from common.step import Candidates, LogprobRows, StepResult
from kernels.sampling.logit_edits import LogitEdits, TokenMasks, with_masks
from kernels.sampling.sampling import TokenLogprobs
from kernels.sampling.sampling_operations import RankedTokens, SamplingOperations
from worker_svc.sampling.edits import pack_edits
from worker_svc.sampling.logprob_rows import logprob_rows
from worker_svc.sampling.sampling_columns import Feature, SamplingColumns
from worker_svc.sampling.to_host import logprobs_to_host, to_host
from worker_svc.steps.step_check import IntArray
from worker_svc.steps.step_upload import Upload


@dataclass(frozen=True, slots=True)
class PackedCandidates:
    """Parameters of C ranked rows; tensors are filled once the upload is sent."""

    logit_rows: Tensor  # int32 [C]
    counts: list[int]
    edits: LogitEdits | None
    num_top: dict[int, int]  # row -> number of the model's most likely tokens that it asks for
    rows_with_top: Tensor | None  # int64, the rows in `num_top`


@dataclass(frozen=True, slots=True)
class RankedRows:
    """The best tokens of C rows, K the largest count, on the device or in pinned memory."""

    packed: PackedCandidates
    ranked: RankedTokens
    logprobs: TokenLogprobs | None  # of candidates of the rows in `num_top`, before any edit

    def fetch(self) -> "RankedRows":
        """Queue the copies to the host, to be read once the step's event is reached."""
        ranked = self.ranked
        return RankedRows(
            packed=self.packed,
            ranked=RankedTokens(to_host(ranked.token_ids), to_host(ranked.logprobs), to_host(ranked.valid)),
            logprobs=None if self.logprobs is None else logprobs_to_host(self.logprobs),
        )

    def fill_result(self, result: StepResult) -> None:
        """Add the candidates of each row; none for a row whose logits were not finite. Call after `fetch` only."""
        token_ids, logprobs = self.ranked.token_ids.tolist(), self.ranked.logprobs.tolist()
        valid, rows_of = self.ranked.valid.tolist(), self._model_rows()
        result.candidates = [
            Candidates(token_ids=token_ids[row][:count], logprobs=logprobs[row][:count], rows=rows_of.get(row))
            if valid[row]
            else Candidates(token_ids=(), logprobs=())
            for row, count in enumerate(self.packed.counts)
        ]

    def _model_rows(self) -> dict[int, LogprobRows]:
        """Log-probabilities by row. Candidates of a row share one position, so they share the most likely tokens."""
        if self.logprobs is None:
            return {}
        num_top = self.packed.num_top
        rows = logprob_rows(self.logprobs, [self.packed.counts[row] for row in num_top], list(num_top.values()))
        return dict(zip(num_top, rows, strict=True))


class CandidateRanker:
    """Ranks for any mix of seats at once, with the operations it is given."""

    def __init__(self, columns: SamplingColumns, operations: SamplingOperations) -> None:
        self._columns = columns
        self._operations = operations

    def pack(
        self, upload: Upload, seats: IntArray, positions: IntArray, logit_rows: IntArray, counts: IntArray
    ) -> PackedCandidates | None:
        """Pack row i: the counts[i] best tokens at positions[i] of seats[i], from row logit_rows[i] of the logits.

        counts are at most V. None if there is nothing to rank.
        """
        if not len(seats):
            return None
        columns = self._columns
        with_top = np.flatnonzero(columns.features[seats] & Feature.LOGPROBS)
        num_top = np.minimum(columns.num_logprobs[seats[with_top]], columns.vocab_size)
        return PackedCandidates(
            logit_rows=upload.add(logit_rows.astype(np.int32)),
            counts=counts.tolist(),
            edits=pack_edits(upload, columns, seats, positions),
            num_top=dict(zip(with_top.tolist(), num_top.tolist(), strict=True)),
            rows_with_top=upload.add(with_top) if len(with_top) else None,
        )

    def launch(
        self, logits: Tensor, packed: PackedCandidates, token_table: Tensor, masks: TokenMasks | None = None
    ) -> RankedRows:
        """Queue the ranking of `logits` [L, V], in any floating dtype.

        `token_table` int32 [num_seats, width] is read for penalties; rows of `masks` are ranked rows.
        """
        operations, logit_rows = self._operations, packed.logit_rows
        edits = with_masks(packed.edits, masks)
        ranked = operations.rank_tokens(logits, logit_rows, max(packed.counts), edits, token_table)
        if packed.rows_with_top is None:
            return RankedRows(packed, ranked, None)
        some_rows = logit_rows.index_select(0, packed.rows_with_top)
        token_ids = ranked.token_ids.index_select(0, packed.rows_with_top)
        return RankedRows(
            packed, ranked, operations.token_logprobs(logits, some_rows, token_ids, max(packed.num_top.values()))
        )
