"""Kinds of steps whose launches are counted: what they compute, what they move, and how they sample."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.random_models import ModelShape
from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step
from worker_svc.steps.step_limits import StepLimits

_NUM_ROWS = 8
_BLOCK = 16
_CONTEXT = 40  # tokens of a row that decodes
_BLOCKS = 4  # of each row
_GREEDY = SequenceSampling(seed=0, temperature=0.0)
_DRAWN = SequenceSampling(seed=1, temperature=0.8)


def kind_limits(shape: ModelShape) -> StepLimits:
    """Limits that hold the steps."""
    return StepLimits(
        num_seats=_NUM_ROWS + 1,
        num_blocks=64,
        num_host_blocks=8,
        block_size=_BLOCK,
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_model_len - 1,  # the table of tokens is a token wider, 16-byte aligned
        max_batched_tokens=128,
    )


def _state(seat: int, sampling: SequenceSampling, first_blocks: Sequence[int] = ()) -> SequenceState:
    """A row that decodes, in blocks of its own behind the given ones."""
    own = range(seat * _BLOCKS, (seat + 1) * _BLOCKS)
    return SequenceState(
        seat=seat,
        position=_CONTEXT,
        block_table=[*first_blocks, *own[len(first_blocks) :]],
        token_ids=[1],
        num_prompt_tokens=_CONTEXT,
        sampling=sampling,
        history=[2] * _CONTEXT,
    )


def _prompt(sampling: SequenceSampling) -> SequenceState:
    seat, count = _NUM_ROWS, 60
    blocks = range(seat * _BLOCKS, (seat + 1) * _BLOCKS)
    return SequenceState(
        seat=seat,
        position=0,
        block_table=blocks,
        token_ids=[3] * count,
        num_prompt_tokens=count,
        sampling=sampling,
    )


def _placed(sampling: SequenceSampling, first_blocks: Sequence[int] = ()) -> Step:
    """The rows' first step, whose launches are not counted."""
    whole = [_state(seat, sampling, first_blocks) for seat in range(_NUM_ROWS)]
    return Step(epoch=1, step_id=1, snapshot=True, whole=whole, rows=range(_NUM_ROWS))


_DECODE = Step(epoch=1, step_id=2, rows=list(range(_NUM_ROWS)))


def _decode(sampling: SequenceSampling) -> list[Step]:
    return [_placed(sampling), _DECODE]


def _mixed(sampling: SequenceSampling) -> list[Step]:
    whole = [_prompt(sampling)]
    rows, num_tokens = list(range(_NUM_ROWS + 1)), [1] * _NUM_ROWS + [60]
    return [_placed(sampling), replace(_DECODE, whole=whole, rows=rows, num_tokens=num_tokens)]


def _prefill(sampling: SequenceSampling) -> list[Step]:
    return [Step(epoch=1, step_id=1, snapshot=True, whole=[_prompt(sampling)], rows=[_NUM_ROWS], num_tokens=[60])]


def _beams() -> list[Step]:
    """Rows are ranked, and one gets a copy of another's last block."""
    ranked = [number for row in range(_NUM_ROWS) for number in (row, 4)]
    return [_placed(_DRAWN), replace(_DECODE, samples=[], candidates=ranked, copies=[2, 6])]


def _swaps() -> list[Step]:
    """Blocks that no row uses leave for the host, and others come back."""
    placed = _placed(_DRAWN)
    placed.swap_out = [60, 0, 61, 1]
    return [placed, replace(_DECODE, swap_out=[62, 2], swap_in=[0, 60, 1, 61])]


# Name, and steps of which the last is counted.
STEP_KINDS: tuple[tuple[str, Sequence[Step]], ...] = (
    ("decode, greedy", _decode(_GREEDY)),
    ("decode, temperature", _decode(_DRAWN)),
    ("decode, top-k and top-p", _decode(replace(_DRAWN, top_k=40, top_p=0.9))),
    ("decode, min-p", _decode(replace(_DRAWN, min_p=0.1))),
    ("decode, penalties", _decode(replace(_DRAWN, repetition_penalty=1.2, frequency_penalty=0.1))),
    ("decode, log-probabilities", _decode(replace(_DRAWN, num_logprobs=3))),
    ("decode, allowed ids and biases", _decode(replace(_DRAWN, allowed_token_ids=(4, 5, 6), logit_bias=((5, 1.0),)))),
    ("decode, shared prefix", [_placed(_DRAWN, first_blocks=[60, 61]), _DECODE]),
    ("decode, beams", _beams()),
    ("decode, swaps", _swaps()),
    ("mixed", _mixed(_DRAWN)),
    ("mixed, top-k and top-p", _mixed(replace(_DRAWN, top_k=40, top_p=0.9))),
    ("mixed, prompt log-probabilities", _mixed(replace(_DRAWN, num_prompt_logprobs=2))),
    ("prefill", _prefill(_DRAWN)),
)
