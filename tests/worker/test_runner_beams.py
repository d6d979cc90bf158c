"""Beam search over a runner's candidates finds what `transformers` finds, on shared blocks, copied and swapped."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.sampling_params import SequenceSampling
from common.step import Step
from scheduler_svc.core.beam_search import BeamSearchParams
from tests.equality import assert_equal_greedy
from tests.scheduler.beam_reference import BeamReport, compare_beams, reference_beams
from tests.worker.beam_driver import BeamDriver
from tests.worker.runners import BLOCK_SIZE, NUM_BLOCKS, MakeRunner, SteppedRunner, full_logits
from tests.worker.step_client import StepClient
from tests.worker.steps import GREEDY, seat_state
from tests.worker.tiny_models import random_prompts, reference_greedy, write_tiny_model
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder, load_decoder

# Seed of the checkpoint, and two tokens that its best beams reach at several lengths: its end-of-sequence ids.
FAMILIES = {"opt": (4, 53, 206), "gpt2": (4, 25, 163), "llama_gqa": (3, 25, 202)}
PROMPT = random_prompts([9], seed=3)[0]
OTHERS = random_prompts([1, 6, 13], seed=8)


@dataclass(frozen=True, slots=True)
class Model:
    """One checkpoint, read by us and by `transformers`."""

    folder: Path
    decoder: Decoder
    reference: Any
    eos_token_ids: frozenset[int]

    def params(self, beam_width: int, max_tokens: int = 16, **fields: Any) -> BeamSearchParams:
        shape = {"beam_width": beam_width, "num_return": beam_width, "max_tokens": max_tokens}
        return BeamSearchParams(**{**shape, "eos_token_ids": self.eos_token_ids, **fields})


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    seed, *eos_token_ids = FAMILIES[request.param]
    folder = write_tiny_model(request.param, tmp_path_factory.mktemp(request.param), seed)
    decoder = load_decoder(folder, torch.float32, torch.device("cpu"))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Model(folder, decoder, reference, frozenset(eos_token_ids))


@pytest.fixture(scope="module")
def reports() -> Iterator[list[BeamReport]]:
    """One of each search; together they show that near ties are rare."""
    reports: list[BeamReport] = []
    yield reports
    sum(reports, BeamReport()).assert_cuts_are_rare()


def search(runner: SteppedRunner, pool: KVPool, driver: BeamDriver, *, chunk: int = 1000) -> int:
    """Run a search to the end, poisoning freed blocks. Returns the number of steps."""
    step_id = 0
    while driver.beams:
        step_id += 1
        step = Step(epoch=1, step_id=step_id, snapshot=step_id == 1, samples=[])
        driver.add_rows(step, chunk)
        pool.blocks[driver.take(runner.run(step).candidates)] = float("nan")
    return step_id


def new_driver(
    model: Model, params: BeamSearchParams, sampling: SequenceSampling = GREEDY, **places: Any
) -> BeamDriver:
    places = {"blocks": range(NUM_BLOCKS), "block_size": BLOCK_SIZE, **places}
    return BeamDriver(PROMPT, params, sampling, **places)


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize(("width", "fields"), [(4, {}), (4, {"early_stopping": True, "length_penalty": 0.6}), (6, {})])
def test_beams_on_shared_blocks_are_those_of_transformers(
    make_runner: MakeRunner, model: Model, width: int, fields: dict[str, Any], chunk: int, reports: list[BeamReport]
) -> None:
    params = model.params(width, **fields)
    runner, pool = make_runner(model.decoder)
    driver = new_driver(model, params)
    num_steps = search(runner, pool, driver, chunk=chunk)
    reports.append(compare_beams(reference_beams(model.reference, PROMPT, params), driver.search.finish()))
    assert sorted(driver.free_blocks) == list(range(NUM_BLOCKS))
    assert driver.num_shared >= 2  # the prompt's full blocks, all along
    assert 0 < driver.num_copies <= num_steps * (params.beam_width - 1)


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (replace(GREEDY, repetition_penalty=1.4), {"repetition_penalty": 1.4}),
        (
            replace(GREEDY, logit_bias=((30, 4.0), (31, -2.0)), repetition_penalty=0.8),
            {"sequence_bias": [[[30], 4.0], [[31], -2.0]], "repetition_penalty": 0.8},
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_edits_act_on_beams_as_the_processors_of_transformers_do(
    make_runner: MakeRunner,
    model: Model,
    sampling: SequenceSampling,
    options: dict[str, Any],
    reports: list[BeamReport],
) -> None:
    params = model.params(4, max_tokens=12)
    runner, pool = make_runner(model.decoder)
    driver = new_driver(model, params, sampling)
    search(runner, pool, driver)
    plain = reference_beams(model.reference, PROMPT, params)
    reference = reference_beams(model.reference, PROMPT, params, **options)
    assert reference.token_ids != plain.token_ids  # or the edit did nothing
    reports.append(compare_beams(reference, driver.search.finish()))


def test_tokens_barred_for_good_act_as_suppress_tokens(
    make_runner: MakeRunner, model: Model, reports: list[BeamReport]
) -> None:
    params = model.params(4, max_tokens=12)
    best = reference_beams(model.reference, PROMPT, params).token_ids[0]
    barred = tuple({best[0], best[2]})
    runner, pool = make_runner(model.decoder)
    driver = new_driver(model, params, replace(GREEDY, suppressed_token_ids=barred, suppressed_until=1000))
    search(runner, pool, driver)
    found = driver.search.finish()
    assert not set(barred) & {token for each in found for token in each.token_ids}
    reports.append(compare_beams(reference_beams(model.reference, PROMPT, params, suppress_tokens=list(barred)), found))


def test_ends_barred_below_a_length_act_as_min_new_tokens(
    make_runner: MakeRunner, model: Model, reports: list[BeamReport]
) -> None:
    params = model.params(4)
    ends = tuple(sorted(model.eos_token_ids))
    sampling = replace(GREEDY, suppressed_token_ids=ends, suppressed_until=len(PROMPT) + 7)
    runner, pool = make_runner(model.decoder)
    driver = new_driver(model, params, sampling)
    search(runner, pool, driver)
    found = driver.search.finish()
    assert min(len(each.token_ids) for each in found) > 7
    reports.append(compare_beams(reference_beams(model.reference, PROMPT, params, min_new_tokens=7), found))


@pytest.mark.long
@pytest.mark.parametrize("first_swap", [2, 3, 7])
def test_a_group_swapped_out_and_in_again_and_again_finds_the_same(
    make_runner: MakeRunner, model: Model, first_swap: int, reports: list[BeamReport]
) -> None:
    """Every third step from the first one on, all its blocks go to the host, and come back elsewhere."""
    params = model.params(4, eos_token_ids=frozenset())
    runner, pool = make_runner(model.decoder)
    halves = list(range(NUM_BLOCKS // 2)), list(range(NUM_BLOCKS // 2, NUM_BLOCKS))
    driver = new_driver(model, params, blocks=halves[0])
    step_id = num_swaps = 0
    while driver.beams:
        step_id += 1
        step = Step(epoch=1, step_id=step_id, snapshot=step_id == 1, samples=[])
        if step_id >= first_swap and (step_id - first_swap) % 3 == 0:
            num_swaps += 1
            moved = driver.move(halves[num_swaps % 2])
            out = [number for host, block in enumerate(moved) for number in (block, host)]
            assert runner.run(Step(epoch=1, step_id=step_id, swap_out=out)).swap_ns > 0
            pool.blocks.fill_(float("nan"))
            step_id += 1
            step.step_id = step_id
            step.swap_in = [number for host, block in enumerate(moved.values()) for number in (host, block)]
        driver.add_rows(step)
        driver.take(runner.run(step).candidates)
    assert num_swaps >= 2
    reports.append(compare_beams(reference_beams(model.reference, PROMPT, params), driver.search.finish()))


@pytest.mark.long
def test_beams_among_greedy_and_sampled_sequences_disturb_nobody(
    make_runner: MakeRunner, model: Model, reports: list[BeamReport]
) -> None:
    """Two searches of their own widths, three greedy sequences and a sampled one, prompts in chunks, all at once."""
    num_tokens, half = 20, NUM_BLOCKS // 2
    sampled = SequenceSampling(seed=4, temperature=1.2, top_k=30)
    runner, pool = make_runner(model.decoder)
    client = StepClient(num_blocks=half, block_size=BLOCK_SIZE, seed=1)
    for prompt in OTHERS:
        client.add(prompt)
    client.add(OTHERS[2], sampled)
    all_params = [model.params(2, max_tokens=18), model.params(5, early_stopping="never")]
    places = [(range(half, half + 16), 4), (range(half + 16, NUM_BLOCKS), 6)]
    drivers = [
        new_driver(model, params, blocks=blocks, first_seat=seat)
        for params, (blocks, seat) in zip(all_params, places, strict=True)
    ]
    while not client.is_done(num_tokens) or any(driver.beams for driver in drivers):
        own = client.next_step(chunk=3)
        step = replace(own, whole=list(own.whole))
        counts = [driver.add_rows(step, chunk=4) for driver in drivers]
        result = runner.run(step)
        client.take(own, result)
        ranked = iter(result.candidates)
        for driver, count in zip(drivers, counts, strict=True):
            pool.blocks[driver.take([next(ranked) for _ in range(count)])] = float("nan")
        assert next(ranked, None) is None
    *greedy, noisy = client.outputs(num_tokens)
    reference = reference_greedy(model.folder, OTHERS, num_tokens)
    assert_equal_greedy(reference.tokens, reference.margins, greedy)
    for driver, params in zip(drivers, all_params, strict=True):
        reports.append(compare_beams(reference_beams(model.reference, PROMPT, params), driver.search.finish()))
    alone = StepClient(num_blocks=half, block_size=BLOCK_SIZE)
    alone.add(OTHERS[2], sampled)
    clean, _ = make_runner(model.decoder)
    while not alone.is_done(num_tokens):
        step = alone.next_step(chunk=64)
        alone.take(step, clean.run(step))
    assert alone.outputs(num_tokens) == [noisy]


def test_ranked_sampled_and_prompt_rows_of_one_step_have_each_their_own_logits(
    make_runner: MakeRunner, model: Model
) -> None:
    """Row 0 is sampled, row 1 ranked, row 2 a part of a prompt; prompts of the last two have log-probabilities."""
    runner, _ = make_runner(model.decoder)
    ranked = replace(GREEDY, num_logprobs=2, num_prompt_logprobs=1)
    states = [
        seat_state(0, OTHERS[1], [1, 2]),
        seat_state(1, PROMPT, [3, 4, 5], sampling=ranked),
        seat_state(2, OTHERS[2], [6, 7], sampling=ranked),
    ]
    step = Step(epoch=1, step_id=1, snapshot=True, whole=states, rows=[0, 1, 2], num_tokens=[6, 9, 5])
    result = runner.run(replace(step, samples=[0, 0], candidates=[1, 3]))
    assert list(result.token_ids) == [int(full_logits(model.decoder, OTHERS[1])[-1].argmax())]
    logprobs = full_logits(model.decoder, PROMPT).log_softmax(-1)
    (found,) = result.candidates
    best = logprobs[-1].topk(3)
    assert list(found.token_ids) == best.indices.tolist()
    assert list(found.logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)
    assert found.rows is not None
    assert (list(found.rows.logprobs), list(found.rows.ranks)) == (list(found.logprobs), [1, 2, 3])
    assert list(found.rows.top_token_ids) == best.indices[:2].tolist() * 3
    of_prompt, of_part = result.prompt_logprobs
    expected = logprobs[range(8), PROMPT[1:]].tolist()
    assert (of_prompt.seat, of_prompt.position) == (1, 1)
    assert list(of_prompt.rows.logprobs) == pytest.approx(expected, abs=1e-4)
    assert (of_part.seat, of_part.position, len(of_part.rows.logprobs)) == (2, 1, 5)


def test_a_ranked_row_that_is_not_finite_has_no_candidates_and_disturbs_no_other(
    make_runner: MakeRunner, model: Model
) -> None:
    runner, pool = make_runner(model.decoder)
    states = [seat_state(0, OTHERS[1], [1, 2]), seat_state(1, PROMPT, [3, 4, 5])]
    step = Step(epoch=1, step_id=1, snapshot=True, whole=states, rows=[0, 1], num_tokens=[6, 9], samples=[])
    clean = runner.run(replace(step, candidates=[0, 4, 1, 4])).candidates
    pool.blocks[3] = float("nan")
    again = [seat_state(0, OTHERS[1], [1, 2]), seat_state(1, PROMPT[8:], [3, 4, 5], position=8, num_prompt_tokens=9)]
    result = runner.run(replace(step, whole=again, num_tokens=[6, 1], candidates=[0, 4, 1, 4]))
    assert list(result.candidates[0].token_ids) == list(clean[0].token_ids)
    assert (result.candidates[1].token_ids, result.candidates[1].logprobs) == ((), ())
