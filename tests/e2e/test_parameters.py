"""Parameters through the whole path, against `transformers` on the same prompt alone."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Unpack

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import quire
from quire.params import GenerateParams
from tests.services import DEMO_MODEL, start_scheduler, start_worker

PROMPT = "One day Tom went to the river. "
GREEDY: GenerateParams = {"temperature": 0.0, "max_tokens": 40}


def greedy(client: quire.Client, prompt: str, **params: Unpack[GenerateParams]) -> quire.Completion:
    return client.generate(prompt, **(GREEDY | params))


@pytest.fixture(scope="module")
def client() -> Iterator[quire.Client]:
    with ExitStack() as stack:
        scheduler, address = start_scheduler("--max-batched-tokens", "16")
        stack.enter_context(scheduler)
        stack.enter_context(start_worker(address, "--dtype", "float32", "--threads", "1", "--num-blocks", "200"))
        scheduler.wait_for("worker ready")
        yield stack.enter_context(quire.Client(address))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


def reference(model: Any, prompt_ids: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt_ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options)
    return output[0, len(prompt_ids) :].tolist()  # type: ignore[no-any-return]


def log_softmax(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


def test_text_ends_where_transformers_ends_it(client: quire.Client, model: Any, tokenizer: Any) -> None:
    prompt_ids = tokenizer(PROMPT).input_ids
    expected = reference(model, prompt_ids, max_new_tokens=200)
    completion = client.generate(PROMPT, temperature=0, max_tokens=200)
    assert list(completion.token_ids) == expected
    assert completion.finish_reason is quire.FinishReason.STOP
    assert completion.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_a_chat_is_the_template_and_its_answer(client: quire.Client, model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
    completion = client.chat(messages, temperature=0, max_tokens=60)
    assert list(completion.token_ids) == reference(model, prompt_ids, max_new_tokens=60)
    assert "Quire" in completion.text


def test_logprobs_are_those_of_the_model(client: quire.Client, model: Any, tokenizer: Any) -> None:
    prompt_ids = tokenizer(PROMPT).input_ids
    completion = client.generate(PROMPT, logprobs=3, temperature=0.7, seed=3, max_tokens=30)
    output_ids = list(completion.token_ids)
    assert completion.logprobs is not None
    rows = log_softmax(model, prompt_ids + output_ids)[len(prompt_ids) - 1 :]
    for token_id, ours, row in zip(output_ids, completion.logprobs, rows, strict=False):
        assert ours.token_id == token_id
        assert math.isclose(ours.logprob, float(row[token_id]), abs_tol=1e-4)
        assert ours.rank == 1 + int((row > row[token_id]).sum())
        top = row.topk(3)
        assert [logprob for _, logprob in ours.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_prompt_logprobs_are_those_of_the_model_in_chunks_too(client: quire.Client, model: Any, tokenizer: Any) -> None:
    text = PROMPT * 6
    prompt_ids = tokenizer(text).input_ids
    completion = client.generate(text, prompt_logprobs=0, temperature=0, max_tokens=2)
    rows = log_softmax(model, prompt_ids)
    expected = [float(rows[i][token]) for i, token in enumerate(prompt_ids[1:])]
    assert completion.prompt_logprobs is not None
    assert [each.logprob for each in completion.prompt_logprobs] == pytest.approx(expected, abs=1e-4)


def test_a_stop_string_cuts_the_text_wherever_the_tokens_are_cut(client: quire.Client) -> None:
    whole = greedy(client, PROMPT).text
    middle = whole[len(whole) // 2 : len(whole) // 2 + 7]
    end = whole.index(middle)
    cut = greedy(client, PROMPT, stop=[middle, "never to be seen"])
    assert cut.text == whole[:end]
    assert cut.finish_reason is quire.FinishReason.STOP
    kept = greedy(client, PROMPT, stop=middle, include_stop=True)
    assert kept.text == whole[: end + len(middle)]


def test_a_stop_token_ends_the_output(client: quire.Client) -> None:
    tokens = greedy(client, PROMPT).token_ids
    stopped = greedy(client, PROMPT, stop_token_ids=[tokens[5]])
    first = list(tokens).index(tokens[5])
    assert list(stopped.token_ids) == list(tokens[: first + 1])


def test_min_tokens_holds_the_end_back(client: quire.Client, model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    short = client.chat(messages, temperature=0, max_tokens=120)
    held = client.chat(messages, temperature=0, max_tokens=120, min_tokens=len(short.token_ids) + 10)
    assert len(held.token_ids) >= len(short.token_ids) + 10
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
    expected = reference(model, prompt_ids, max_new_tokens=120, min_new_tokens=len(short.token_ids) + 10)
    assert list(held.token_ids) == expected


def test_repetition_penalty_is_that_of_transformers(client: quire.Client, model: Any, tokenizer: Any) -> None:
    prompt_ids = tokenizer(PROMPT).input_ids
    expected = reference(model, prompt_ids, max_new_tokens=40, repetition_penalty=1.4)
    assert list(greedy(client, PROMPT, repetition_penalty=1.4).token_ids) == expected


def test_allowed_tokens_are_the_only_ones_and_bias_decides_among_them(client: quire.Client) -> None:
    allowed = [50, 60, 70]
    completion = client.generate(PROMPT, allowed_token_ids=allowed, temperature=1.0, max_tokens=60, seed=1)
    assert set(completion.token_ids) <= set(allowed)
    biased = client.generate(PROMPT, allowed_token_ids=allowed, logit_bias={60: 100.0}, temperature=1.0, max_tokens=20)
    assert set(biased.token_ids) == {60}


def test_tokenize_and_detokenize_are_each_others_inverse(client: quire.Client, tokenizer: Any) -> None:
    tokens = client.tokenize(PROMPT)
    assert list(tokens.token_ids) == tokenizer(PROMPT).input_ids
    assert client.detokenize(tokens.token_ids) == PROMPT
    assert client.detokenize(tokens.token_ids, keep_special_tokens=True) == tokenizer.decode(tokens.token_ids)


def test_a_prefix_once_computed_is_found_again_and_salt_keeps_it_apart(client: quire.Client) -> None:
    text = "Anna had a kite. " * 20
    assert greedy(client, text, tenant="a").usage.cached_tokens == 0
    assert greedy(client, text, tenant="a").usage.cached_tokens >= 64
    assert greedy(client, text, tenant="b").usage.cached_tokens == 0
    assert greedy(client, text, tenant="a", cache_salt="mine").usage.cached_tokens == 0
