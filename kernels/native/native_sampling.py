"""Sampling in C++ behind the interface `SamplingOperations`, for logits on the CPU.

Tokens equal those of `sampling_operations.REFERENCES`. Libraries round float64 exp and log differently in the last
place: a sum of probabilities may be off by 2^-40 for each of its tokens, a score by about 1e-15. So a token can differ
only where two are that close. A log-probability may be off by the rounding of float32. The library's threads share the
rows; the result of a row does not depend on the rest of the batch.
"""

from ctypes import CDLL, POINTER, Structure, byref, c_int32, c_int64, c_void_p, pointer
from typing import Any

import torch
from torch import Tensor

from kernels.sampling.choice_reference import ChosenTokens, SampleRows
from kernels.sampling.logit_edits import LogitEdits, TokenPairs
from kernels.sampling.sampling import TokenLogprobs
from kernels.sampling.sampling_operations import RankedTokens, SamplingOperations


class _Pairs(Structure):
    """`Pairs` of src/logit_edits.h."""

    _fields_ = (("rows", c_void_p), ("token_ids", c_void_p), ("count", c_int64))


class _Edits(Structure):
    """`Edits` of src/logit_edits.h."""

    _fields_ = (
        ("masked_rows", c_void_p),
        ("mask_words", c_void_p),
        ("num_masked", c_int64),
        ("words_per_mask", c_int64),
        ("allowed", _Pairs),
        ("suppressed", _Pairs),
        ("biased", _Pairs),
        ("biases", c_void_p),
        ("penalised_rows", c_void_p),
        ("seats", c_void_p),
        ("lengths", c_void_p),
        ("num_prompt", c_void_p),
        ("penalties", c_void_p),
        ("num_penalised", c_int64),
        ("token_table", c_void_p),
        ("table_stride", c_int64),
    )


class _Samples(Structure):
    """`Samples` of src/sample.cpp."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("size", c_int64),
        ("num_samples", c_int64),
        ("logit_rows", c_void_p),
        ("temperatures", c_void_p),
        ("floors", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("keys", c_void_p),
        ("edits", POINTER(_Edits)),
        ("token_ids", c_void_p),
        ("valid", c_void_p),
        ("half", c_int32),
    )


class _Ranking(Structure):
    """`Ranking` of src/rank.cpp."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("size", c_int64),
        ("num_rows", c_int64),
        ("num_best", c_int64),
        ("logit_rows", c_void_p),
        ("edits", POINTER(_Edits)),
        ("token_ids", c_void_p),
        ("logprobs", c_void_p),
        ("valid", c_void_p),
        ("half", c_int32),
    )


class _Logprobs(Structure):
    """`Logprobs` of src/rank.cpp."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("size", c_int64),
        ("num_rows", c_int64),
        ("num_tokens", c_int64),
        ("num_top", c_int64),
        ("logit_rows", c_void_p),
        ("token_ids", c_void_p),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("top_token_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("half", c_int32),
    )


class NativeSampling:
    """Sampling operations; each call releases the interpreter's lock."""

    def __init__(self, library: CDLL, num_threads: int) -> None:
        self._library, self._num_threads = library, num_threads

    @property
    def operations(self) -> SamplingOperations:
        return SamplingOperations(
            choose_tokens=self.choose_tokens, rank_tokens=self.rank_tokens, token_logprobs=self.token_logprobs
        )

    def choose_tokens(
        self, logits: Tensor, rows: SampleRows, edits: LogitEdits | None, token_table: Tensor
    ) -> ChosenTokens:
        """See SamplingOperations."""
        logits = _rows_with_contiguous_values(logits)
        token_ids = torch.empty(len(rows), dtype=torch.int32)
        valid = torch.empty(len(rows), dtype=torch.bool)
        samples = _Samples(
            **_memory_of(logits),
            num_samples=len(rows),
            logit_rows=_address(rows.logit_rows, torch.int32),
            temperatures=_address(rows.temperatures, torch.float32),
            floors=_address(rows.floors, torch.float32),
            top_k=_address(rows.top_k, torch.int32),
            top_p=_address(rows.top_p, torch.float64),
            keys=_address(rows.keys, torch.int64),
            edits=_edits(edits, token_table),
            token_ids=token_ids.data_ptr(),
            valid=valid.data_ptr(),
        )
        self._library.quire_choose_tokens(byref(samples), self._num_threads)
        return ChosenTokens(token_ids, valid)

    def rank_tokens(
        self, logits: Tensor, logit_rows: Tensor, num_best: int, edits: LogitEdits | None, token_table: Tensor
    ) -> RankedTokens:
        """See SamplingOperations."""
        logits = _rows_with_contiguous_values(logits)
        shape = len(logit_rows), min(num_best, logits.shape[1])
        token_ids, logprobs = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        valid = torch.empty(len(logit_rows), dtype=torch.bool)
        ranking = _Ranking(
            **_memory_of(logits),
            num_rows=len(logit_rows),
            num_best=shape[1],
            logit_rows=_address(logit_rows, torch.int32),
            edits=_edits(edits, token_table),
            token_ids=token_ids.data_ptr(),
            logprobs=logprobs.data_ptr(),
            valid=valid.data_ptr(),
        )
        self._library.quire_rank_tokens(byref(ranking), self._num_threads)
        return RankedTokens(token_ids, logprobs, valid)

    def token_logprobs(self, logits: Tensor, logit_rows: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
        """See SamplingOperations."""
        logits = _rows_with_contiguous_values(logits)
        num_rows, num_top = len(logit_rows), min(num_top, logits.shape[1])
        logprobs, ranks = torch.empty(token_ids.shape), torch.empty(token_ids.shape, dtype=torch.int32)
        top_token_ids = torch.empty((num_rows, num_top), dtype=torch.int32)
        top_logprobs = torch.empty((num_rows, num_top))
        call = _Logprobs(
            **_memory_of(logits),
            num_rows=num_rows,
            num_tokens=token_ids.shape[1],
            num_top=num_top,
            logit_rows=_address(logit_rows, torch.int32),
            token_ids=_address(token_ids, torch.int64),
            logprobs=logprobs.data_ptr(),
            ranks=ranks.data_ptr(),
            top_token_ids=top_token_ids.data_ptr(),
            top_logprobs=top_logprobs.data_ptr(),
        )
        self._library.quire_token_logprobs(byref(call), self._num_threads)
        return TokenLogprobs(logprobs, ranks, top_token_ids, top_logprobs)


def _rows_with_contiguous_values(logits: Tensor) -> Tensor:
    """Logits as given, or a float32 copy if the library cannot read their layout or dtype."""
    is_read = logits.dtype in (torch.float32, torch.bfloat16) and logits.stride(1) == 1
    return logits if is_read else logits.to(torch.float32).contiguous()


def _memory_of(logits: Tensor) -> dict[str, Any]:
    assert logits.is_cpu
    return {
        "logits": logits.data_ptr(),
        "stride": logits.stride(0),
        "size": logits.shape[1],
        "half": logits.dtype == torch.bfloat16,
    }


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    assert tensor.dtype == dtype and tensor.is_contiguous()
    return tensor.data_ptr()


def _edits(edits: LogitEdits | None, token_table: Tensor) -> Any:
    """Pointer to the memory of `edits` and the table, which must outlive it."""
    if edits is None:
        return None
    memory = _Edits(allowed=_pairs(edits.allowed), suppressed=_pairs(edits.suppressed), biased=_pairs(edits.biased))
    if edits.masks is not None:
        memory.masked_rows = _address(edits.masks.rows, torch.int64)
        memory.mask_words = _address(edits.masks.words, torch.int32)
        memory.num_masked, memory.words_per_mask = edits.masks.words.shape
    if edits.biases is not None:
        memory.biases = _address(edits.biases, torch.float32)
    penalised = edits.penalties
    if penalised is not None and len(penalised):
        assert token_table.dtype == torch.int32 and token_table.stride(1) == 1
        assert penalised.max_length <= token_table.shape[1]
        memory.penalised_rows = _address(penalised.logit_rows, torch.int32)
        memory.seats = _address(penalised.seats, torch.int32)
        memory.lengths = _address(penalised.lengths, torch.int32)
        memory.num_prompt = _address(penalised.num_prompt, torch.int32)
        memory.penalties = _address(penalised.penalties, torch.float32)
        memory.num_penalised = len(penalised)
        memory.token_table, memory.table_stride = token_table.data_ptr(), token_table.stride(0)
    return pointer(memory)


def _pairs(pairs: TokenPairs | None) -> _Pairs:
    if pairs is None:
        return _Pairs()
    return _Pairs(_address(pairs.rows, torch.int64), _address(pairs.token_ids, torch.int64), len(pairs.token_ids))
