"""The largest group that may be admitted: it always gets done, and nothing larger could."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.scheduler_config import SchedulerConfig
from tests.scheduler.core_cluster import Cluster

shapes = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(1, 24),
        "block_size": st.sampled_from([1, 2, 4, 5]),
        "num_prompt_tokens": st.integers(1, 40),
        "num_sequences": st.integers(1, 5),
        "watermark": st.sampled_from([0.0, 0.0, 0.1, 0.3]),
        "is_beam": st.booleans(),
        "depth": st.sampled_from([1, 2]),
        "num_host_blocks": st.sampled_from([0, 6]),
    }
)


class Alone:
    """A group in a pool of its own."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_prompt_tokens: int,
        num_sequences: int,
        watermark: float,
        is_beam: bool,
        depth: int,
        num_host_blocks: int,
    ) -> None:
        self.cluster = Cluster(SchedulerConfig(watermark=watermark, pipeline_depth=depth, preemption="swap"))
        self.cluster.add_worker(num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks)
        self.capacity_blocks = num_blocks - int(num_blocks * watermark)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_sequences = num_sequences
        self.is_beam = is_beam
        self.block_size = block_size
        self.fit = self.cluster.scheduler.workers.max_tokens_that_fit(num_prompt_tokens, num_sequences)

    def add(self, num_tokens: int) -> None:
        """Add a group with this many tokens of prompt and output for each member."""
        prompt = [i % 13 + 1 for i in range(self.num_prompt_tokens)]
        max_tokens = num_tokens - self.num_prompt_tokens
        self.group = self.cluster.add_group(prompt, self.num_sequences, max_tokens, is_beam=self.is_beam)

    def run(self) -> int:
        """Run the group to its end; return the most blocks in use after a step."""
        peak = 0
        while not self.group.is_finished:
            if self.cluster.start() is None:
                self.cluster.complete()
            peak = max(peak, self.cluster.stats().num_used_blocks)
            self.cluster.scheduler.check()
        self.cluster.run_until_idle()
        return peak


@settings(max_examples=250)
@given(shapes)
def test_the_largest_group_that_fits_gets_done_without_giving_way(shape: dict[str, int]) -> None:
    alone = Alone(**shape)  # type: ignore[arg-type]
    if alone.fit <= alone.num_prompt_tokens:
        return  # it is refused: see the next
    alone.add(alone.fit)
    peak = alone.run()
    assert alone.group.num_preemptions == 0
    alone.cluster.assert_outputs_are_unconstrained()
    alone.cluster.assert_idle_and_unleaked()
    assert peak <= alone.capacity_blocks


@settings(max_examples=250)
@given(shapes)
def test_a_group_one_token_larger_than_fits_is_never_started(shape: dict[str, int]) -> None:
    alone = Alone(**shape)  # type: ignore[arg-type]
    alone.add(max(alone.fit, alone.num_prompt_tokens) + 1)
    assert alone.group.worst_case_blocks(alone.block_size) > alone.capacity_blocks
    assert alone.cluster.start() is None
    assert alone.cluster.scheduler.waiting.num_groups >= 1
    alone.cluster.scheduler.finish_group(alone.group)
    alone.cluster.assert_idle_and_unleaked()


@settings(max_examples=250)
@given(shapes)
def test_the_longest_prompt_and_the_most_sequences_are_the_last_that_fit(shape: dict[str, int]) -> None:
    alone = Alone(**shape)  # type: ignore[arg-type]
    workers, num_sequences = alone.cluster.scheduler.workers, alone.num_sequences

    def fits(num_prompt_tokens: int, num_sequences: int) -> bool:
        return workers.max_tokens_that_fit(num_prompt_tokens, num_sequences) > num_prompt_tokens

    most_tokens = alone.capacity_blocks * alone.block_size
    fitting = [length for length in range(1, most_tokens + 2) if fits(length, num_sequences)]
    assert fitting == [*range(1, workers.longest_prompt_that_fits(num_sequences) + 1)]
    assert [each for each in range(1, 30) if fits(1, each)] == [*range(1, workers.max_sequences_that_fit() + 1)]


@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 6, 8, 11])
@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5])
@pytest.mark.parametrize("num_blocks", [15, 16, 17, 24])
def test_the_largest_group_of_samples_really_comes_to_hold_what_is_kept_for_it(
    num_prompt_tokens: int, num_sequences: int, num_blocks: int
) -> None:
    """A pool of one block less could not have held it, so the bound is not needlessly low."""
    alone = Alone(
        num_blocks=num_blocks,
        block_size=4,
        num_prompt_tokens=num_prompt_tokens,
        num_sequences=num_sequences,
        watermark=0.0,
        is_beam=False,
        depth=1,
        num_host_blocks=0,
    )
    alone.add(alone.fit)
    worst = alone.group.worst_case_blocks(4)
    assert worst <= num_blocks < worst + num_sequences  # one more block for each would not fit
    assert alone.run() == worst
