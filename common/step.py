"""A step and its result inside scheduler and worker: plain data, no protobuf.

`step_codec` encodes them for the wire; `protos/quire/v1/worker.proto` documents the fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from common.sampling_params import SequenceSampling

Ints = Sequence[int]
Floats = Sequence[float]


class StepStatus(IntEnum):
    """Outcome of a step; the numbers are those of the wire."""

    OK = 1
    NEED_SNAPSHOT = 2
    STALE_EPOCH = 3
    FAILED = 4
    INVALID = 5


@dataclass(slots=True, kw_only=True)
class SequenceState:
    """The whole state of a sequence on a worker."""

    seat: int
    position: int
    block_table: Ints
    token_ids: Ints  # from `position` on
    num_prompt_tokens: int
    sampling: SequenceSampling
    history: Ints = ()  # before `position`; only with penalties or a grammar


@dataclass(slots=True, kw_only=True)
class Step:
    """One iteration for one worker, struct of arrays; pairs and triples are flat."""

    epoch: int
    step_id: int
    snapshot: bool = False
    freed_seats: Ints = ()
    whole: list[SequenceState] = field(default_factory=list)
    append_pairs: Ints = ()  # (seat, block)
    swap_out: Ints = ()  # (device block, host block)
    placed: Ints = ()  # (fetch, index in it, device block), after swap_out and before swap_in
    swap_in: Ints = ()  # (host block, device block)
    copies: Ints = ()  # (source block, destination block)
    rows: Ints = ()  # seats
    num_tokens: Ints = ()  # one per row; empty: 1 each
    samples: Ints | None = None  # (row, seat); None: every row into its own seat
    candidates: Ints = ()  # (row, k): nothing is sampled there, the k best next tokens are answered
    num_spare_positions: int = 0  # of each seat's blocks, that forced tokens leave free


@dataclass(slots=True, kw_only=True)
class LogprobRows:
    """n rows of log-probabilities, each with the num_top most likely tokens."""

    logprobs: Floats  # [n]
    ranks: Ints  # [n], 1 for the most likely
    num_top: int = 0
    top_token_ids: Ints = ()  # [n * num_top], best first in each row
    top_logprobs: Floats = ()  # [n * num_top]


@dataclass(slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens from `position` on."""

    seat: int
    position: int
    rows: LogprobRows


@dataclass(slots=True, kw_only=True)
class Candidates:
    """The best next tokens of a row, best first; none if its logits were not finite."""

    token_ids: Ints
    logprobs: Floats  # one per token id, after the seat's edits; -inf for a token that is not allowed
    rows: LogprobRows | None = None  # one per token id, of the model's own distribution, if the seat asks for it


@dataclass(slots=True, kw_only=True)
class StepResult:
    """The answer to one step."""

    epoch: int
    step_id: int
    status: StepStatus = StepStatus.OK
    error: str = ""
    token_ids: Ints = ()  # in the order of the samples
    invalid_samples: Ints = ()  # indices of samples whose logits were not finite
    logprobs: dict[int, LogprobRows] = field(default_factory=dict)  # by index of the sample
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    queue_ns: int = 0
    exec_ns: int = 0
    total_ns: int = 0
    swap_ns: int = 0  # time of moving blocks between device and host, which may overlap with computing
    candidates: list[Candidates] = field(default_factory=list)  # in the order of the step's
    forced: dict[int, Ints] = field(default_factory=dict)  # by index of the sample: tokens before its own
