"""Tokens that grammars force, in steps of the runner with a real decoder: computed as if they had been sampled."""

import json
from collections.abc import Iterator, Sequence

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step
from kernels.native.torch_kernels import TorchKernels
from tests.worker.runners import full_logits, limits_for, poisoned_pool
from tests.worker.steps import seat_state
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.runner import CpuRunner
from worker_svc.model.decoder import Decoder
from worker_svc.sampling.grammar_matcher import GrammarVocabulary
from worker_svc.sampling.seat_grammars import SeatGrammars

END, A, B, C = range(4)
PROMPT = [5, 6, 7]


@pytest.fixture
def runner(decoder: Decoder) -> Iterator[CpuRunner]:
    tokenizer = Tokenizer(BPE(vocab={"<end>": END, "a": A, "b": B, "c": C}, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary = GrammarVocabulary(tokenizer.to_str().encode(), decoder.config.vocab_size, [END])
    model = HostDecoder(decoder, TorchKernels())
    yield CpuRunner(model, poisoned_pool(decoder), limits_for(decoder), SeatGrammars(lambda: vocabulary))


def seat(number: int, grammar: str, num_blocks: int, *, forces: bool = True) -> SequenceState:
    """A seat whose whole prompt is computed by its first step. Blocks hold 4 tokens."""
    grammars = json.dumps({"grammars": [{"lark_grammar": f"start: {grammar}"}]}) if grammar else ""
    sampling = SequenceSampling(seed=0, temperature=0.0, grammar=grammars, forces_text=forces and bool(grammar))
    return seat_state(number, PROMPT, range(8 * number, 8 * number + num_blocks), sampling=sampling)


def first_step(whole: list[SequenceState]) -> Step:
    rows, num_tokens = [state.seat for state in whole], [len(PROMPT)] * len(whole)
    return Step(epoch=1, step_id=1, snapshot=True, whole=whole, rows=rows, num_tokens=num_tokens, num_spare_positions=1)


def best_of(decoder: Decoder, output: Sequence[int], choice: Sequence[int]) -> int:
    """The likeliest of these tokens behind the prompt and the output."""
    logits = full_logits(decoder, [*PROMPT, *output])[-1]
    return max(choice, key=lambda token_id: float(logits[token_id]))


def test_each_seat_gets_what_its_grammar_forces_as_far_as_its_blocks_have_room(
    runner: CpuRunner, decoder: Decoder
) -> None:
    """Behind the prompt and a token, blocks have room for 3 tokens or 7, beside the spare position."""
    whole = [
        seat(1, '"abca"', 3, forces=False),
        seat(2, '"bbbbbbbbb"', 2),
        seat(3, '"abc" ("a" | "b" | "c")', 3),
        seat(4, "", 3),
    ]
    first = runner.launch(first_step(whole))
    free = best_of(decoder, [], range(decoder.config.vocab_size))
    assert (list(first.token_ids), first.forced) == ([A, B, A, free], {})
    second = runner.launch(Step(epoch=1, step_id=2, rows=[1, 2, 3, 4], num_spare_positions=1))
    assert second.forced == {1: [B, B, B], 2: [B, C]}
    after = [best_of(decoder, [A, B, C], [A, B, C]), best_of(decoder, [free], range(decoder.config.vocab_size))]
    assert list(second.token_ids) == [B, B, *after]
    third = runner.launch(Step(epoch=1, step_id=3, rows=[1, 3], num_spare_positions=1))
    assert (list(third.token_ids), third.forced) == ([C, END], {})


def test_rows_without_anything_to_force_are_left_as_they_are(runner: CpuRunner, decoder: Decoder) -> None:
    whole = [seat(1, '"a" ("a" | "b") ("b" | "c")', 3)]
    runner.launch(first_step(whole))
    second = runner.launch(Step(epoch=1, step_id=2, rows=[1], num_spare_positions=1))
    chosen = best_of(decoder, [A], [A, B])
    assert (list(second.token_ids), second.forced) == ([chosen], {})
    third = runner.launch(Step(epoch=1, step_id=3, rows=[1], num_spare_positions=1))
    assert list(third.token_ids) == [best_of(decoder, [A, chosen], [B, C])]
