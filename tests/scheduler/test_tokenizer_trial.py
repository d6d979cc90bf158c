"""A tokenizer is tried in a process of its own before it is read here, and one out of proportion encodes in one."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest

from quire.errors import FailedPreconditionError, InvalidRequestError
from quire.rpc import error_of
from quire.v1 import inference_pb2 as pb
from quire.v1 import worker_pb2
from scheduler_svc.text.tokenizer import ModelTokenizer
from scheduler_svc.text.tokenizer_program import is_usual
from scheduler_svc.text.tokenizer_trial import TokenizerProcesses
from scheduler_svc.workers.tokenizer_maker import MAX_WAITING, TokenizerMaker
from tests.patience import patient
from tests.scheduler.mortal_sites import speaking_worker
from tests.scheduler.refusals import refusal_of
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in
from tests.scheduler.test_served_model import why_not
from tests.scheduler.text_tokenizers import byte_fallback_json, byte_level_json, ours

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HOSTILE = "(x+x+)+y"
SLOW_TEXT = ("x" * 22 + " ") * 700  # each run takes some 0.06 s, and none so long that the library gives up
TEXT = "The quick brown fox, and 12 dogs."


def with_split(pattern: str, **parts: Any) -> bytes:
    content = json.loads(byte_level_json())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    return json.dumps({**content, **parts}).encode()


def replacing(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def template(num_copies: int) -> dict[str, Any]:
    single = [{"Sequence": {"id": "A", "type_id": 0}}] * num_copies
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {}}


@pytest.mark.parametrize(
    ("tokenizer_json", "expected"),
    [
        (byte_level_json(), True),
        (byte_fallback_json(), True),
        (with_split(LLAMA_3), True),
        (with_split(HOSTILE), False),
        (with_split(LLAMA_3, normalizer=replacing("b")), True),
        (with_split(LLAMA_3, normalizer=replacing("b" * 1000)), False),
        (with_split(LLAMA_3, normalizer={"type": "Sequence", "normalizers": [replacing("b" * 1000)]}), False),
        (with_split(LLAMA_3, normalizer={"type": "Replace", "pattern": {"Regex": HOSTILE}, "content": ""}), False),
        (with_split(LLAMA_3, post_processor=template(1)), True),
        (with_split(LLAMA_3, post_processor=template(2)), False),
    ],
)
def test_what_is_in_proportion_to_its_text_is_told_from_what_need_not_be(tokenizer_json: bytes, expected: bool) -> None:
    assert is_usual(json.loads(tokenizer_json)) is expected
    assert TokenizerProcesses(tokenizer_json).try_out() is expected


def test_an_encoding_in_a_process_is_the_same() -> None:
    tokenizer = ModelTokenizer(byte_level_json(), "", {}, TokenizerProcesses(byte_level_json()))
    for text in (TEXT, "", "\n" * 50, "你好 👩‍👩‍👧"):
        for special in (False, True):
            assert tokenizer.encode(text, special) == ours(byte_level_json()).encode(text, special)
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        tokenizer.encode("\ud800", True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tokenizer_json", "text"),
    [(with_split(HOSTILE), SLOW_TEXT), (with_split(LLAMA_3, normalizer=replacing("b" * 2000)), "a" * 8000)],
    ids=["an expression that backtracks", "a replacement by megabytes"],
)
def test_a_text_that_takes_too_long_or_too_much_is_refused_and_the_next_one_encoded(
    tokenizer_json: bytes, text: str
) -> None:
    """The first took a minute of a thread that everybody's texts wait for, and a longer one hours."""
    tokenizer = ModelTokenizer(tokenizer_json, "", {}, TokenizerProcesses(tokenizer_json))
    with pytest.raises(InvalidRequestError, match=r"takes more than .* for this text: shorten or change it"):
        tokenizer.encode(text, True)
    assert tokenizer.encode("The fox", True) == ours(tokenizer_json).encode("The fox", True)


def test_a_tokenizer_that_takes_too_long_to_be_tried_is_refused_in_words() -> None:
    pattern = r"(\w{1,30}\w{1,30}){1,2}(?!\w|\W|$)"  # many thousand ways to fail, at each place of a text
    began_s = time.process_time()
    with pytest.raises(ValueError, match=r"takes more than 0.3 s or 3 GiB to be read and tried"):
        TokenizerProcesses(with_split(pattern), trial_cpu_s=0.3).try_out()
    assert time.process_time() - began_s < 0.2, "not of this process"


BAD = {
    "no JSON": (b"{", "tokenizer.json cannot be read"),
    "nested lists": (b"[" * 1_000_000, "tokenizer.json cannot be read"),
    "an expression in the decoder": (
        with_split(LLAMA_3, decoder={"type": "Replace", "pattern": {"Regex": HOSTILE}, "content": ""}),
        "its decoder has a regular expression",
    ),
}


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


@pytest.mark.parametrize(("tokenizer_json", "said"), BAD.values(), ids=BAD)
async def test_a_worker_whose_tokenizer_fails_its_trial_is_refused_and_others_serve_on(
    site: Site, tokenizer_json: bytes, said: str
) -> None:
    await site.add_worker("honest")
    bad = speaking_worker("bad")
    bad.description.tokenizer.tokenizer_json = tokenizer_json
    assert said in await why_not(site, bad)
    assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]


async def test_texts_of_one_client_that_take_too_long_stop_nobody(site: Site) -> None:
    worker = speaking_worker()
    worker.description.model.max_model_len = 20_000
    worker.description.tokenizer.tokenizer_json = with_split(HOSTILE)
    await site.start_worker(worker)
    slow = [asyncio.create_task(site.run(pb.GenerateRequest(text=SLOW_TEXT))) for _ in range(3)]
    async with asyncio.timeout(patient(30)):
        assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]
        assert (await site.inference.Tokenize(pb.TokenizeRequest(text=TEXT))).token_ids
        for each in slow:
            assert isinstance(error_of(await refusal_of(each)), InvalidRequestError)
        await site.run(pb.GenerateRequest(text=TEXT, stopping=pb.StoppingParams(max_tokens=1)))


def described(tokenizer_json: bytes, template: str = "") -> worker_pb2.DescribeResponse:
    description = speaking_worker().description
    description.tokenizer.tokenizer_json, description.tokenizer.chat_template = tokenizer_json, template
    return description


async def test_the_same_files_are_made_once_whoever_brings_them() -> None:
    maker = TokenizerMaker(lambda: None, lambda _: nullcontext())
    first, again = await asyncio.gather(*(maker.make(described(byte_level_json())) for _ in range(2)))
    assert first is not None and first is again
    assert await maker.make(described(byte_level_json(), "{{ 1 }}")) is not first


async def test_the_same_bad_files_are_refused_each_time() -> None:
    maker = TokenizerMaker(lambda: None, lambda _: nullcontext())
    for _ in range(2):
        with pytest.raises(FailedPreconditionError, match="cannot be read"):
            await maker.make(described(b"{"))


async def test_the_loop_goes_on_while_many_tokenizers_are_tried_and_of_those_that_wait_there_is_a_most() -> None:
    maker = TokenizerMaker(lambda: None, lambda _: nullcontext())
    made = [asyncio.create_task(maker.make(described(byte_level_json()))) for _ in range(MAX_WAITING + 1)]
    done, waiting = await asyncio.wait(made, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = done
    assert "are being tried" in str(refused.exception())
    assert len(waiting) == MAX_WAITING
    assert all(await asyncio.gather(*waiting))


async def test_the_lease_is_held_for_longer_only_while_the_tokenizer_is_read_here() -> None:
    held_s: list[float] = []

    @asynccontextmanager
    async def longer(seconds: float) -> AsyncIterator[None]:
        held_s.append(seconds)
        yield
        held_s.append(0.0)

    maker = TokenizerMaker(lambda: None, longer)
    assert await maker.make(described(byte_level_json()))
    with pytest.raises(FailedPreconditionError):
        await maker.make(described(b"{"))
    (asked_s, after_s) = held_s
    assert asked_s > 0
    assert after_s == 0
