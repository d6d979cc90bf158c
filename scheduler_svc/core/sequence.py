"""A sequence of tokens that is being served: what was asked, what is known, and where it stands.

Its state is written by the scheduler (and the worker state beside it) alone; everybody may read it.
It knows nothing of requests, text, streams or sampling parameters.
"""

from dataclasses import dataclass, field
from enum import Enum


class SequenceStatus(Enum):
    """WAITING was never run; PREEMPTED lost its blocks and waits again, in the same queue."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_computed_tokens` chases `num_tokens`: prefill, decode and recomputation are this one rule."""

    seq_id: int  # unique in the process, rising with arrival
    token_ids: list[int]  # prompt, then confirmed output
    num_prompt_tokens: int
    max_tokens: int  # bound of output tokens
    stop_token_ids: frozenset[int]  # empty for ignore_eos
    min_tokens: int = 0
    priority: int = 0  # lower is served first
    hash_seed: bytes = b""  # root of the hash chain: tenant and cache salt
    use_prefix_cache: bool = True  # lookup only; its own blocks are cached for others in any case

    status: SequenceStatus = SequenceStatus.WAITING
    worker_id: str | None = None  # where it runs; if preempted, where its pending tokens come from
    slot: int | None = None
    num_computed_tokens: int = 0  # KV is in the blocks, or will be once the steps in flight are done
    num_pending_tokens: int = 0  # sampled by steps in flight, not yet known here
    block_table: list[int] = field(default_factory=list)  # one reference to each
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks, made once
    num_cached_tokens: int = 0  # prefix found in the cache when it was first scheduled
    num_preemptions: int = 0
    num_lost_tokens: int = 0  # computed, then lost with the blocks; to be computed again
    num_offered_blocks: int = 0  # leading blocks of the table already offered to the prefix cache
    num_tokens_at_start: int = 0  # num_tokens when its present stay on a worker began
    num_times_left: int = 0  # as head of the queue: how often a worker left it to another
    admitted_step: int = 0  # first step of its present stay on a worker
    last_step: int = 0  # latest step with a row of it

    def __post_init__(self) -> None:
        if not 1 <= self.num_prompt_tokens <= len(self.token_ids):
            raise ValueError(
                f"num_prompt_tokens is {self.num_prompt_tokens}: give 1 to {len(self.token_ids)}, "
                "the number of token_ids"
            )
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: give at least 1")

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those included that only the worker knows yet."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Confirmed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def worst_case_tokens(self) -> int:
        """Prompt and output at their longest."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def has_all_tokens(self) -> bool:
        """Whether `max_tokens` are sampled, pending ones included: nothing is left to compute."""
        return self.num_tokens >= self.worst_case_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def sort_key(self) -> tuple[int, int]:
        """First come, first served within a priority."""
        return (self.priority, self.seq_id)

    def lose_computed_tokens(self) -> None:
        """The blocks are gone: everything is to be computed again."""
        self.num_lost_tokens = max(self.num_lost_tokens, self.num_computed_tokens)
        self.num_computed_tokens = 0

    def ends_with_stop_token(self) -> bool:
        """Whether the last confirmed token is a stop token that counts (`min_tokens` reached)."""
        num_output_tokens = self.num_output_tokens
        return (
            num_output_tokens > 0 and num_output_tokens >= self.min_tokens and self.token_ids[-1] in self.stop_token_ids
        )
