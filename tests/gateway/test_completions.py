"""`/v1/completions` by OpenAI's own client, compared with the SDK on the same deployment."""

import math
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import quire
from tests.gateway.conftest import MODEL
from tests.services import DEMO_MODEL

PROMPT = "Once upon a time"
OTHER = "One day a small puppy"


def test_a_greedy_completion_is_the_sdks(api: openai.OpenAI, sdk: quire.Client) -> None:
    expected = sdk.generate(PROMPT, temperature=0, max_tokens=24)
    completion = api.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=24)
    assert completion.object == "text_completion"
    assert completion.id.startswith("cmpl-")
    assert completion.model == MODEL
    [choice] = completion.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (expected.text, "length", None)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 24
    assert completion.usage.prompt_tokens == expected.usage.prompt_tokens
    assert completion.usage.total_tokens == 24 + expected.usage.prompt_tokens


def test_max_tokens_is_16_unless_given(api: openai.OpenAI) -> None:
    completion = api.completions.create(model=MODEL, prompt=PROMPT, extra_body={"ignore_eos": True})
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16


def test_every_sampling_field_reaches_the_sampler(api: openai.OpenAI, sdk: quire.Client) -> None:
    expected = sdk.generate(
        PROMPT,
        temperature=0.9,
        top_p=0.95,
        top_k=40,
        min_p=0.01,
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        logit_bias={262: -5.0},
        min_tokens=4,
        ignore_eos=True,
        max_tokens=24,
    )
    completion = api.completions.create(
        model=MODEL,
        prompt=PROMPT,
        temperature=0.9,
        top_p=0.95,
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={"262": -5},
        max_tokens=24,
        extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 4, "ignore_eos": True},
    )
    assert completion.choices[0].text == expected.text


@pytest.mark.parametrize("all_tokens", [0, -1])
def test_top_k_of_none_is_all_tokens(api: openai.OpenAI, all_tokens: int) -> None:
    texts = [
        api.completions.create(model=MODEL, prompt=PROMPT, seed=3, max_tokens=16, extra_body=extra).choices[0].text
        for extra in ({"top_k": all_tokens}, {})
    ]
    assert texts[0] == texts[1]


def test_a_negative_seed_is_a_seed(api: openai.OpenAI, sdk: quire.Client) -> None:
    completion = api.completions.create(model=MODEL, prompt=PROMPT, seed=-1, max_tokens=12)
    assert completion.choices[0].text == sdk.generate(PROMPT, seed=2**64 - 1, max_tokens=12).text


def test_prompts_are_text_or_token_ids_one_or_several(api: openai.OpenAI, sdk: quire.Client) -> None:
    ids = [list(sdk.tokenize(each).token_ids) for each in (PROMPT, OTHER)]
    expected = [sdk.generate(each, temperature=0, max_tokens=8).text for each in (PROMPT, OTHER)]
    forms: list[Any] = [[PROMPT, OTHER], ids]
    for prompt in forms:
        completion = api.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8)
        assert [choice.text for choice in completion.choices] == expected
        assert [choice.index for choice in completion.choices] == [0, 1]
    one = api.completions.create(model=MODEL, prompt=ids[1], temperature=0, max_tokens=8)
    assert one.choices[0].text == expected[1]


def test_n_outputs_of_several_prompts_are_numbered_by_prompt(api: openai.OpenAI, sdk: quire.Client) -> None:
    completion = api.completions.create(model=MODEL, prompt=[PROMPT, OTHER], n=2, seed=5, max_tokens=8)
    expected = [s.text for each in (PROMPT, OTHER) for s in sdk.generate(each, n=2, seed=5, max_tokens=8).samples]
    assert [choice.text for choice in completion.choices] == expected
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]


def test_streams_add_up_to_the_whole_answer(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": [PROMPT, OTHER], "n": 2, "seed": 5, "max_tokens": 20}
    whole = api.completions.create(**fields)
    texts, reasons, ids = [""] * 4, [None] * 4, set()
    usages = []
    for event in api.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        ids.add(event.id)
        if event.usage is not None:
            usages.append(event.usage)
            assert event.choices == []
        for choice in event.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(ids) == 1
    assert usages == [whole.usage]


def test_stop_strings_end_the_text_before_them(api: openai.OpenAI) -> None:
    whole = api.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=40).choices[0].text
    stop = whole[20:24]
    for given in (stop, [stop, "never in it"]):
        [choice] = api.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=40, stop=given).choices
        assert choice.text == whole[: whole.index(stop)]
        assert choice.finish_reason == "stop"
    kept = api.completions.create(
        model=MODEL,
        prompt=PROMPT,
        temperature=0,
        max_tokens=40,
        stop=stop,
        extra_body={"include_stop_str_in_output": True},
    )
    assert kept.choices[0].text == whole[: whole.index(stop)] + stop


def test_beams_and_best_of_come_ranked(api: openai.OpenAI, sdk: quire.Client) -> None:
    beams = api.completions.create(model=MODEL, prompt=PROMPT, n=2, max_tokens=12, extra_body={"beam_width": 4})
    expected = sdk.generate(PROMPT, beam_width=4, n=2, max_tokens=12)
    assert [choice.text for choice in beams.choices] == [sample.text for sample in expected.samples]
    best = api.completions.create(model=MODEL, prompt=PROMPT, n=1, best_of=3, seed=4, max_tokens=12)
    assert best.choices[0].text == sdk.generate(PROMPT, n=1, best_of=3, seed=4, max_tokens=12).text


def test_logprobs_are_parallel_lists_whose_offsets_spell_the_text(api: openai.OpenAI) -> None:
    [choice] = api.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=20, logprobs=3).choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset and logprobs.top_logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert all(
        choice.text[start:].startswith(token)
        for start, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
    )
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 3


def test_streamed_logprobs_are_those_of_the_whole_answer(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "n": 2, "seed": 9, "max_tokens": 20, "logprobs": 2}
    fields["echo"] = True
    whole = api.completions.create(**fields)
    found: list[dict[str, list[Any]]] = [{}, {}]
    texts = ["", ""]
    for event in api.completions.create(**fields, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                for name, values in choice.logprobs.to_dict().items():
                    found[choice.index].setdefault(name, []).extend(values)
    assert texts == [choice.text for choice in whole.choices]
    assert found == [choice.logprobs.to_dict() for choice in whole.choices if choice.logprobs is not None]


def test_echo_scores_a_prompt_as_transformers_does(api: openai.OpenAI) -> None:
    """Evaluation harnesses ask for this: token ids, echo, log-probabilities, one token."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ids = tokenizer("Once upon a time there was a clever boy named Anton. He lived near the river.").input_ids
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    completion = api.completions.create(
        model=MODEL, prompt=[ids], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1
    )
    [choice] = completion.choices
    assert choice.text.startswith(tokenizer.decode(ids))
    assert choice.logprobs is not None
    scores, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    assert scores is not None and tops is not None
    assert len(scores) == len(ids) + 1
    assert scores[0] is None
    for position in range(1, len(ids)):
        row = expected[position - 1]
        assert math.isclose(scores[position], row[ids[position]], abs_tol=1e-4)
        assert math.isclose(max(tops[position].values()), row.max(), abs_tol=1e-4)


def test_echo_begins_with_the_prompt_as_it_was_given(api: openai.OpenAI, sdk: quire.Client) -> None:
    output = sdk.generate(PROMPT, temperature=0, max_tokens=6).text
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "echo": True}
    assert api.completions.create(**fields, max_tokens=6).choices[0].text == PROMPT + output
    [alone] = api.completions.create(**fields, max_tokens=0, logprobs=0).choices
    assert alone.text == PROMPT
    assert alone.logprobs is not None and alone.logprobs.tokens is not None and alone.logprobs.text_offset is not None
    *_, last = alone.logprobs.tokens
    assert PROMPT.endswith(last)
    assert alone.logprobs.text_offset[-1] == len(PROMPT) - len(last)


def test_an_echo_alone_counts_and_names_no_token_beyond_the_prompt(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": [PROMPT, "x"], "echo": True, "max_tokens": 0}
    fields["extra_body"] = {"return_token_ids": True}
    whole = api.completions.create(**fields)
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (0, whole.usage.prompt_tokens)
    assert [choice.to_dict()["token_ids"] for choice in whole.choices] == [[], []]
    fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = api.completions.create(**fields, stream=True)
    assert last.usage == whole.usage
    assert {event.usage.completion_tokens for event in events if event.usage} == {0}
    assert all(choice.to_dict()["token_ids"] == [] for event in events for choice in event.choices)


def test_token_ids_come_if_asked_for(api: openai.OpenAI, sdk: quire.Client) -> None:
    expected = sdk.generate(PROMPT, temperature=0, max_tokens=9)
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 9}
    fields["extra_body"] = {"return_token_ids": True}
    whole = api.completions.create(**fields).choices[0].to_dict()
    assert whole["token_ids"] == list(expected.token_ids)
    streamed: list[int] = []
    for event in api.completions.create(**fields, stream=True):
        streamed += event.choices[0].to_dict()["token_ids"]
    assert streamed == list(expected.token_ids)
