"""A sequence of tokens that is being served, and the group of sequences that one request is.

The scheduler and the files beside it are the only writers; every caller may read.
Knows nothing of requests, text, streams or sampling parameters.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from scheduler_svc.core.group_state import NEXT_STATES, GroupState


class SequenceStatus(Enum):
    """Status of one member. WAITING has never run; PREEMPTED has lost its blocks or its place on a worker.

    IDLE is a beam that no hypothesis uses at the moment.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    IDLE = "idle"
    FINISHED = "finished"


class Tail(NamedTuple):
    """Name of what a sequence had computed when it was stopped, where that ends within a block: see `tails`."""

    num_tokens: int  # from the beginning of the sequence
    block_hash: bytes


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_computed_tokens` chases `num_tokens`: prefill, decode and recomputation are this one rule."""

    seq_id: int  # unique in the process, rising with arrival
    token_ids: list[int]  # prompt, then confirmed output
    num_prompt_tokens: int
    max_tokens: int  # bound of output tokens
    stop_token_ids: frozenset[int]  # empty for ignore_eos
    min_tokens: int = 0
    hash_seed: bytes = b""  # root of the hash chain: tenant and cache salt
    use_prefix_cache: bool = True  # lookup only; its own blocks are cached for others in any case

    group: "SequenceGroup" = field(init=False, repr=False)  # set by the group that takes it
    status: SequenceStatus = SequenceStatus.WAITING
    worker_id: str | None = None  # where it runs; if preempted, where its pending tokens come from
    seat: int | None = None
    num_computed_tokens: int = 0  # KV is in the blocks, or will be once the steps in flight are done
    num_pending_tokens: int = 0  # sampled by steps in flight, not yet known here
    block_table: list[int] = field(default_factory=list)  # one reference to each
    fork_tail: int | None = None  # one reference; see `forking`
    host_blocks: Seq[int] = ()  # while swapped; one reference to each
    has_host_tail: bool = False  # the last of them is a fork_tail
    source: "Sequence | None" = None  # computes the tokens that the two share; until then this one has no row
    num_shared_tokens: int = 0  # that many, while there is a source
    is_decoding: bool = False  # the whole group has caught up, and each of its steps samples: one token at a time
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks, made once
    tail: Tail | None = None  # of its last stop
    num_cached_tokens: int = 0  # prefix found in the cache when it was first scheduled
    num_preemptions: int = 0
    num_lost_tokens: int = 0  # computed, then lost with the blocks; to be computed again
    num_registered_blocks: int = 0  # leading blocks of the table already put into the prefix cache
    num_tokens_at_start: int = 0  # num_tokens when it was last started on a worker
    first_step_id: int = 0  # first step since its start that describes its seat to the worker; 0: none yet
    last_step: int = 0  # latest step with a row or a sample of it

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
        """Confirmed and pending tokens; only the worker knows the pending ones yet."""
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
        """True once `max_tokens` are sampled, pending ones included: nothing is left to compute."""
        return self.num_tokens >= self.worst_case_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def is_live(self) -> bool:
        """True if it has tokens to continue: neither finished nor an idle beam."""
        return self.status is not SequenceStatus.FINISHED and self.status is not SequenceStatus.IDLE

    @property
    def has_caught_up(self) -> bool:
        """True once every token that it had when it was started has its KV."""
        return self.source is None and self.num_computed_tokens >= self.num_tokens_at_start

    @property
    def has_gained_token(self) -> bool:
        """True once it has sampled a token since its start; a beam's token does not count before it is chosen."""
        num_tokens = len(self.token_ids) if self.group.awaits_host else self.num_tokens
        return num_tokens > self.num_tokens_at_start

    @property
    def sort_key(self) -> tuple[float, ...]:
        """Order in which running sequences are served; the members of a group stand together."""
        return (*self.group.order, self.seq_id)

    def lose_computed_tokens(self) -> None:
        """Count its computed tokens as lost: the blocks are gone, and all is to be computed again."""
        self.num_lost_tokens = max(self.num_lost_tokens, self.num_computed_tokens)
        self.num_computed_tokens = 0

    def leave_worker(self) -> None:
        """Clear seat and blocks. The caller has freed them, or they are gone with the worker."""
        self.seat = None
        self.block_table = []
        self.fork_tail = None
        self.source = None
        self.is_decoding = False
        self.num_registered_blocks = 0
        self.first_step_id = 0

    @property
    def has_ended(self) -> bool:
        """True if its confirmed tokens are at their end: the last is a stop token, or they are `max_tokens`."""
        return self.num_output_tokens >= self.max_tokens or self.ends_with_stop_token()

    def ends_with_stop_token(self) -> bool:
        """True if the last confirmed token is a stop token that counts (`min_tokens` reached)."""
        num_output_tokens = self.num_output_tokens
        return (
            num_output_tokens > 0 and num_output_tokens >= self.min_tokens and self.token_ids[-1] in self.stop_token_ids
        )


@dataclass(slots=True, eq=False)
class Cohort:
    """Suspected groups that are tried together: a step with one of them has rows of this cohort alone."""

    groups: "dict[SequenceGroup, None]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences of one request: they have one prompt, and are started, preempted and restored together."""

    # At least one, by seq_id; the first computes the prompt, the others fork from it. Empty after `forget_group`.
    sequences: list[Sequence]
    arrival: int  # unique, rising
    priority: int = 0  # lower is served first
    deadline_s: float | None = None  # monotonic
    owner: str = ""  # tenant whose queue limits it counts for
    awaits_host: bool = False  # beams: each next token is chosen by the host, from candidates
    num_candidates: int = 0  # with awaits_host: how many best next tokens the host wants to see of each beam

    state: GroupState = GroupState.NEW  # written by `move_to` alone
    order: tuple[float, ...] = ()  # by the policy: priority first, then what it orders by
    worker_id: str | None = None  # where it runs; if preempted, where its pending tokens come from
    swap_step: int | None = None  # while its blocks are in the host pool of its worker: the step that moved them
    cohort: Cohort | None = None  # while it is suspected, in whatever state: see `isolation`
    waits_since_s: float | None = None  # monotonic: when it was first seen to wait, or since its pause; see `aging`
    destination: str | None = None  # worker that it was stopped to go on at, until that fetches its blocks
    is_leaving: bool = False  # it was stopped to go on at another worker, and has not started since
    fetch_id: int = 0  # the latest fetch of its blocks since it was last started, under way or ended; 0: none
    num_times_left: int = 0  # as head of the queue: how often a worker left it to another
    shares: list[tuple[int, int]] | None = None  # while it waits: see `sharing`
    num_preemptions: int = 0  # of the whole group
    num_copied_blocks: int = 0  # copy-on-write
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_fetched_blocks: int = 0  # from other workers
    num_recomputed_tokens: int = 0  # lost by a preemption, or with a worker, and not found in the cache

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ValueError("a group without a sequence: give at least 1")
        for sequence in self.sequences:
            sequence.group = self

    def move_to(self, state: GroupState) -> None:
        """Change the state. The caller keeps the containers in step; see `group_places`."""
        assert state in NEXT_STATES[self.state], f"group {self.arrival} moves from {self.state.name} to {state.name}"
        self.state = state

    @property
    def is_paused(self) -> bool:
        return self.state is GroupState.PAUSED

    @property
    def is_preempted(self) -> bool:
        """True if it has run, and lost its place on a worker."""
        return any(sequence.status is SequenceStatus.PREEMPTED for sequence in self.live)

    @property
    def live(self) -> list[Sequence]:
        """Members that have something to compute, or had until their last token was sampled."""
        return [sequence for sequence in self.sequences if sequence.is_live]

    @property
    def unfinished(self) -> list[Sequence]:
        """Members that need a seat while the group runs, idle beams included."""
        return [s for s in self.sequences if s.status is not SequenceStatus.FINISHED]

    @property
    def is_finished(self) -> bool:
        return not self.unfinished

    @property
    def has_caught_up(self) -> bool:
        """True once every member has computed what it had when the group was started; before that none decodes."""
        return all(sequence.has_caught_up for sequence in self.live)

    @property
    def num_pending_tokens(self) -> int:
        return sum(sequence.num_pending_tokens for sequence in self.live)

    @property
    def awaits_decision(self) -> bool:
        """True once the candidates of every live beam are known, so that `replace_beams` may be called."""
        live = self.live
        return (
            self.awaits_host
            and bool(live)
            and all(
                s.status is SequenceStatus.RUNNING
                and not s.num_pending_tokens
                and s.num_computed_tokens == s.num_tokens
                for s in live
            )
        )

    @property
    def num_distinct_tokens(self) -> int:
        """Tokens of the prompt, counted once, and of the output of every live member."""
        prompt = self.sequences[0].num_prompt_tokens
        return prompt + sum(sequence.num_tokens - prompt for sequence in self.live)

    def worst_case_blocks(self, block_size: int) -> int:
        """Blocks that it holds when every member is at its longest and they share no more than the prompt."""
        num_shared = self.sequences[0].num_prompt_tokens // block_size
        num_blocks = num_shared
        for sequence in self.sequences:  # a plain loop: a check may ask every group in the queue
            if sequence.status is not SequenceStatus.FINISHED:
                num_blocks += -(-(sequence.num_prompt_tokens + sequence.max_tokens) // block_size) - num_shared
        return num_blocks
