"""Panics of the tokenizer's library, which are no `Exception`: the call gets an error, others notice nothing."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from common.native_faults import CONTROL_FLOW
from quire.errors import InvalidRequestError
from quire.rpc import error_of
from quire.v1 import inference_pb2 as pb
from quire.v1 import worker_pb2
from scheduler_svc.text.incremental_decoder import IncrementalDecoder
from scheduler_svc.text.tokenizer import ModelTokenizer
from tests.patience import patient
from tests.scheduler.raw_session import RawSession
from tests.scheduler.refusals import refusal_of
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in
from tests.scheduler.text_tokenizers import SPECIAL_TOKENS, byte_level_json, ours

PANICS = "x" * 60  # the expression below tries all ways to part it, until the library's patience is over: a panic
BAD_TOKEN = 207
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def panicking_json() -> bytes:
    """A tokenizer as of LLaMA 3: an expression splits the text first. This one backtracks without bound."""
    content = json.loads(byte_level_json())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    return json.dumps(content).encode()


class Panic(BaseException):
    """Stands in for the library's own, which cannot be made at will where text is decoded."""


class PanickingDecoder(IncrementalDecoder):
    def push(self, token_id: int) -> str:
        if token_id == BAD_TOKEN:
            raise Panic("no text for this one")
        return super().push(token_id)


class PanickingTokenizer(ModelTokenizer):
    def decoder(self, context: Sequence[int], *, keep_special_tokens: bool) -> IncrementalDecoder:
        return PanickingDecoder(self._tokenizer, bytes([1]) * 1000, context, keep_special_tokens=keep_special_tokens)


class UnspeakableTokenizer(ModelTokenizer):
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise Panic("a secret of ours")


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    worker = ScriptedWorker()
    worker.description.model.max_model_len = 2000
    worker.description.tokenizer.CopyFrom(
        worker_pb2.TokenizerFiles(
            fingerprint="t1", tokenizer_json=panicking_json(), chat_template=TEMPLATE, special_tokens=SPECIAL_TOKENS
        )
    )
    async with running_site() as made:
        await made.start_worker(worker)
        yield made


def test_the_library_really_panics_and_what_it_raises_is_no_exception() -> None:
    tokenizer: Any = ours(panicking_json())
    with pytest.raises(BaseException) as caught:
        tokenizer._tokenizer.encode_batch_fast([PANICS])
    assert not isinstance(caught.value, Exception) and not isinstance(caught.value, CONTROL_FLOW)


def test_a_text_that_makes_the_tokenizer_panic_is_refused_and_the_next_one_is_encoded() -> None:
    tokenizer = ours(panicking_json(), TEMPLATE)
    with pytest.raises(InvalidRequestError, match="text: cannot be encoded by the model's tokenizer"):
        tokenizer.encode(PANICS, True)
    with pytest.raises(InvalidRequestError, match="chat: cannot be encoded by the model's tokenizer"):
        tokenizer.encode_chat([{"role": "user", "content": PANICS}], True)
    assert tokenizer.encode("The quick brown fox", True) == ours(byte_level_json()).encode("The quick brown fox", True)


@pytest.mark.parametrize("rpc", ["Generate", "Tokenize", "PinPrefix"])
@pytest.mark.parametrize("is_chat", [False, True])
async def test_every_rpc_that_tokenises_answers_a_panic(site: Site, rpc: str, is_chat: bool) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=PANICS)])
    prompt: dict[str, Any] = {"chat": chat} if is_chat else {"text": PANICS}
    calls: dict[str, Any] = {
        "Generate": lambda: site.run(pb.GenerateRequest(**prompt)),
        "Tokenize": lambda: site.inference.Tokenize(pb.TokenizeRequest(**prompt)),
        "PinPrefix": lambda: site.inference.PinPrefix(pb.PinPrefixRequest(name="p", **prompt)),
    }
    async with asyncio.timeout(patient(20)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls[rpc]()
    assert isinstance(error_of(caught.value), InvalidRequestError)
    assert tokens_in(await site.run(counting(10, 3))) == [11, 12, 13]
    await site.idle()


async def test_on_a_session_a_panic_is_an_event_of_its_request(site: Site) -> None:
    session = RawSession(site)
    await session.say(1, submit=counting(10, 50))
    await session.say(2, submit=pb.GenerateRequest(text=PANICS))
    assert (await session.read_until("error", 2)).error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    await session.read_until("finished", 1)
    assert session.tokens(1) == list(range(11, 61))
    await session.close()


async def test_a_panic_while_text_is_made_fails_its_request_alone(site: Site) -> None:
    model = site.admission.model
    assert model is not None
    site.admission.model = replace(model, tokenizer=PanickingTokenizer(byte_level_json(), "", SPECIAL_TOKENS))
    good, bad = asyncio.create_task(site.run(counting(10, 60))), asyncio.create_task(site.run(counting(200, 20)))
    async with asyncio.timeout(patient(20)):
        error = await refusal_of(bad)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "text of its output could not be made" in (error.details() or "")
        assert tokens_in(await good) == list(range(11, 71))
    await site.idle()


async def test_a_panic_that_nobody_expected_is_internal_and_no_call_goes_without_an_answer(site: Site) -> None:
    session = RawSession(site)
    await session.say(1, submit=counting(10, 500))
    await session.read_until("accepted", 1)
    model = site.admission.model
    assert model is not None
    site.admission.model = replace(model, tokenizer=UnspeakableTokenizer(byte_level_json(), "", SPECIAL_TOKENS))
    async with asyncio.timeout(patient(20)):
        refusal = await refusal_of(site.run(pb.GenerateRequest(text="a text")))
        assert refusal.code() is grpc.StatusCode.INTERNAL and "secret" not in (refusal.details() or "")
        await session.say(2, submit=pb.GenerateRequest(text="a text"))
        assert (await session.read_until("error", 2)).error.code == grpc.StatusCode.INTERNAL.value[0]
        await session.read_until("finished", 1)
    await session.close()
