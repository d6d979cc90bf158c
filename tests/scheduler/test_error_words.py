"""Errors name what the user typed: the SDK's keyword, the command's flag. Every field of a request is tried."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import typer
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from typer.testing import CliRunner

import quire
from common.bounds import MOST_ANNOTATION_BYTES
from quire.cli.app import app
from quire.cli.flags import flags_of
from quire.keywords import keyword_of
from quire.params import GenerateParams
from quire.v1 import inference_pb2 as pb
from tests.scheduler.serving_site import Site, running_site

OF_THE_CLIENT = {"session_key"}  # it chooses the shard by it, and sends it to nobody
GROUPS = {"sampling", "stopping", "output", "beam", "structured_output"}
TOO_LONG = "x" * 129
# For each keyword what it cannot be, with what else it takes for that.
BAD: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": -1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 0.0},
    "min_p": {"min_p": 2.0},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "presence_penalty": {"presence_penalty": 9.0},
    "frequency_penalty": {"frequency_penalty": -9.0},
    "logit_bias": {"logit_bias": {-1: 0.0}},
    "allowed_token_ids": {"allowed_token_ids": [-1]},
    "seed": {"seed": -1},
    "first_sample_index": {"first_sample_index": 2**32 - 1, "n": 2},
    "n": {"n": 0},
    "best_of": {"best_of": 1, "n": 2},
    "beam_width": {"beam_width": 1},
    "length_penalty": {"length_penalty": 9.0, "beam_width": 2},
    "early_stopping": {"early_stopping": "sometimes", "beam_width": 2},
    "json_schema": {"json_schema": "{"},
    "json_object": {"json_object": "perhaps"},
    "regex": {"regex": ""},
    "choice": {"choice": [""]},
    "lark": {"lark": ""},
    "json_whitespace": {"json_whitespace": "sometimes", "regex": "a"},
    "max_tokens": {"max_tokens": 0},
    "min_tokens": {"min_tokens": 6, "max_tokens": 5},
    "stop": {"stop": [""]},
    "stop_token_ids": {"stop_token_ids": [-1]},
    "ignore_eos": {"ignore_eos": "perhaps"},
    "include_stop": {"include_stop": "perhaps"},
    "token_ids": {"token_ids": "perhaps"},
    "logprobs": {"logprobs": 99},
    "prompt_logprobs": {"prompt_logprobs": 99},
    "keep_special_tokens": {"keep_special_tokens": "perhaps"},
    "text_ends": {"text_ends": "perhaps"},
    "request_id": {"request_id": "no id"},
    "timeout_s": {"timeout_s": -1.0},
    "tenant": {"tenant": TOO_LONG},
    "cache_salt": {"cache_salt": TOO_LONG},
    "on_disconnect": {"on_disconnect": "perhaps"},
    "priority": {"priority": 1 << 40},
    "annotation": {"annotation": bytes(MOST_ANNOTATION_BYTES + 1)},
}
PROMPTS: dict[str, list[Any]] = {
    "prompt": [[], [-1], "x" * 70_000, "x" * 12_000_000],
    "messages": [[], [{"role": "", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": "x" * 70_000}]],
}
OF_A_CHAT = {"add_generation_prompt", "continue_final_message", "tools", "template_kwargs"}  # keywords of `chat` alone
GENERATE = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
FLAGS = flags_of(GENERATE)
OF_THE_COMMAND = {"address", "as_json", "stats"}  # say nothing of the request


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        await made.add_worker()
        yield made


def leaves(message: Descriptor, prefix: str = "") -> list[str]:
    """Paths of all fields, through the messages that hold them."""
    found = []
    for field in message.fields:
        inner = field.message_type
        if inner is not None and field.type == FieldDescriptor.TYPE_MESSAGE and not inner.GetOptions().map_entry:
            found += leaves(inner, f"{prefix}{field.name}.")
        else:
            found.append(prefix + field.name)
    return found


async def refusal(site: Site, prompt: Any = (1, 2), **params: Any) -> quire.InvalidRequestError:
    async with quire.AsyncClient(site.address) as client:
        with pytest.raises(quire.InvalidRequestError) as caught:
            await client.generate(prompt, **params)
    return caught.value


def assert_names(error: quire.InvalidRequestError, keyword: str) -> None:
    assert error.violations
    for each in error.violations:
        assert re.fullmatch(rf"{keyword}([\[.].*)?", each.field), each
    assert error.message.startswith(error.violations[0].field)
    assert not re.search(r"\b(sampling|stopping|output|beam)\.|_ms\b", error.message), error.message


def test_every_field_of_a_request_is_a_keyword_of_which_something_is_tried() -> None:
    assert set(BAD) == set(GenerateParams.__annotations__) - GROUPS - OF_THE_CLIENT
    keywords = {re.split(r"[.\[]", keyword_of(path, "prompt"))[0] for path in leaves(pb.GenerateRequest.DESCRIPTOR)}
    assert keywords == {*BAD, *PROMPTS, *OF_A_CHAT}


@pytest.mark.parametrize("keyword", BAD)
async def test_the_sdk_names_the_keyword(site: Site, keyword: str) -> None:
    assert_names(await refusal(site, **BAD[keyword]), keyword)


async def test_the_sdk_names_keywords_in_what_the_lengths_do_not_allow(site: Site) -> None:
    error = await refusal(site, [1] * 100, max_tokens=100_000)
    assert_names(error, "max_tokens")
    error = await refusal(site, [1] * 100, n=2, max_tokens=900)
    assert_names(error, "max_tokens")
    assert "lower n, or serve" in error.message


@pytest.mark.parametrize(("keyword", "number"), [(name, number) for name in PROMPTS for number in range(4)])
async def test_the_sdk_names_the_prompt(site: Site, keyword: str, number: int) -> None:
    prompt = PROMPTS[keyword][number]
    site.admission.require_model()
    async with quire.AsyncClient(site.address) as client:
        call = client.chat(prompt) if keyword == "messages" else client.generate(prompt)
        with pytest.raises((quire.InvalidRequestError, quire.FailedPreconditionError)) as caught:
            await call
    if isinstance(caught.value, quire.InvalidRequestError):
        assert_names(caught.value, keyword)
    else:  # what has no token to be counted is refused for want of a tokenizer
        assert "no tokenizer" in caught.value.message


async def test_the_sdk_names_the_prefix_of_a_pin(site: Site) -> None:
    async with quire.AsyncClient(site.address) as client:
        for prefix in ([-1], [1, 2], [quire.ChatMessage("", "x")]):
            with pytest.raises(quire.InvalidRequestError) as caught:
                await client.pin_prefix("rules", prefix)
            assert_names(caught.value, "prefix")


def test_every_flag_of_generate_that_goes_into_a_request_is_tried() -> None:
    assert set(FLAGS) - OF_THE_COMMAND - OF_THE_CLIENT <= set(BAD)


@pytest.mark.parametrize("keyword", sorted(set(FLAGS) & set(BAD) - {"ignore_eos", "json_object"}))
async def test_the_command_names_the_flag(site: Site, keyword: str) -> None:
    arguments = ["generate", "hello", "-a", site.address, "--json"]
    for name, value in BAD[keyword].items():
        for each in value if isinstance(value, list) else [value]:
            arguments += [FLAGS[name], str(each)]
    ended = await asyncio.to_thread(CliRunner().invoke, app, arguments, env={"COLUMNS": "300", "TERM": "dumb"})
    assert ended.exit_code == 2, ended.output
    assert FLAGS[keyword] in ended.stderr
    if ended.stderr.startswith("quire: "):
        assert ended.stderr.startswith(f"quire: {FLAGS[keyword]}")
    assert not re.search(r"\b(sampling|stopping|output|beam)\.", ended.stderr)
    assert not [name for name in FLAGS if "_" in name and name in ended.stderr], ended.stderr


async def test_a_description_names_the_other_flag_too(site: Site) -> None:
    arguments = ["generate", "hello", "-a", site.address, "--min-tokens", "6", "--max-tokens", "5"]
    ended = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert ended.stderr == "quire: --min-tokens: is 6, more than --max-tokens (5): lower it or raise that\n"
    ended = await asyncio.to_thread(CliRunner().invoke, app, ["generate", "hi", "--length-penalty", "2"])
    assert ended.stderr == "quire: --length-penalty belongs to a beam search: give --beam-width as well\n"


@pytest.mark.parametrize(("positions", "field"), [(9, "from_position[0]"), ([0, 1], "from_position[1]")])
async def test_the_sdk_names_a_position_that_an_output_cannot_have(
    site: Site, positions: int | list[int], field: str
) -> None:
    async with quire.AsyncClient(site.address) as client:
        done = await client.generate([1, 2, 3], max_tokens=4, on_disconnect=quire.OnDisconnect.CONTINUE)
        with pytest.raises(quire.InvalidRequestError) as caught:
            await client.attach(done.request_id, positions).completion()
    assert_names(caught.value, re.escape(field))
