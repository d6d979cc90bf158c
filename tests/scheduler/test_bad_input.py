"""Bad input over the wire: refused in words before any worker hears of it, while everybody else is served."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from common.arrays import unpack_int32
from quire.errors import InvalidRequestError, OverloadedError
from quire.rpc import PUBLIC_MESSAGE_BYTES, channel_options, error_of
from quire.v1 import cluster_pb2, worker_pb2
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.prompt_checks import ModelLimits, check_tokenize
from tests.chaos_input.fuzzed_requests import fuzz
from tests.scheduler.refusals import code_of, refusal_of
from tests.scheduler.scripted_worker import VOCAB_SIZE, ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in
from tests.scheduler.text_tokenizers import SPECIAL_TOKENS, byte_level_json, ours

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
MEGABYTES = 1024 * 1024
MAX_MODEL_LEN = 2000
NUM_FUZZED = 200
SERVICES = [*pb.DESCRIPTOR.services_by_name.values(), *cluster_pb2.DESCRIPTOR.services_by_name.values()]
METHODS = [f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods]

GIANTS = {
    "a text of 8 MB": ("text", pb.GenerateRequest(text="word " * (8 * MEGABYTES // 5))),
    "a text of one token after another": ("text", pb.GenerateRequest(text="\n" * MEGABYTES)),
    "more token ids than the context": (
        "token_ids.ids",
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * MEGABYTES)),
    ),
    "a chat of 8 MB": (
        "chat.messages",
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * 8 * MEGABYTES)])),
    ),
    "a chat of 100,000 messages": (
        "chat.messages",
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")] * 100_000)),
    ),
    "a million stop strings": (
        "stopping.stop",
        pb.GenerateRequest(text="x", stopping=pb.StoppingParams(stop=["stop"] * 1_000_000)),
    ),
    "200,000 biased tokens": (
        "sampling.logit_bias",
        pb.GenerateRequest(text="x", sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(200_000), 1.0))),
    ),
    "a million allowed tokens": (
        "sampling.allowed_token_ids",
        pb.GenerateRequest(text="x", sampling=pb.SamplingParams(allowed_token_ids=range(1_000_000))),
    ),
    "a tenant of 8 MB": ("tenant", pb.GenerateRequest(text="x", tenant="t" * 8 * MEGABYTES)),
    "more than the KV memory": ("stopping.max_tokens", counting(1, 1500)),
}


@pytest.fixture
async def worker() -> ScriptedWorker:
    """A model that speaks, with a context of 2,000 tokens and memory for 64 * 16 = 1,024."""
    worker = ScriptedWorker()
    worker.description.model.max_model_len = MAX_MODEL_LEN
    worker.description.tokenizer.CopyFrom(
        worker_pb2.TokenizerFiles(
            fingerprint="t1", tokenizer_json=byte_level_json(), chat_template=TEMPLATE, special_tokens=SPECIAL_TOKENS
        )
    )
    return worker


@pytest.fixture
async def site(worker: ScriptedWorker) -> AsyncIterator[Site]:
    async with running_site() as made:
        await made.start_worker(worker)
        yield made


@pytest.mark.parametrize("giant", GIANTS)
async def test_what_can_never_be_served_is_refused_by_its_field_and_no_worker_hears_of_it(
    site: Site, worker: ScriptedWorker, giant: str
) -> None:
    field, request = GIANTS[giant]
    error = error_of(await refusal_of(site.run(request)))
    assert isinstance(error, InvalidRequestError)
    assert [each.field for each in error.violations] == [field]
    assert len(error.message) < 500  # nothing of it comes back
    assert not worker.steps
    assert tokens_in(await site.run(counting(10, 2))) == [11, 12]


@pytest.mark.parametrize("giant", ["a text of 8 MB", "a chat of 8 MB", "a chat of 100,000 messages"])
async def test_what_is_no_prompt_is_neither_tokenised_nor_pinned(site: Site, giant: str) -> None:
    field, request = GIANTS[giant]
    either: dict[str, Any] = {request.WhichOneof("prompt") or "": getattr(request, request.WhichOneof("prompt") or "")}
    calls: list[Any] = [
        site.inference.Tokenize(pb.TokenizeRequest(**either)),
        site.inference.PinPrefix(pb.PinPrefixRequest(name="p", **either)),
    ]
    for call in calls:
        error = error_of(await refusal_of(call))
        assert isinstance(error, InvalidRequestError) and [each.field for each in error.violations] == [field]


async def test_no_more_ids_are_made_text_than_a_context_may_hold(site: Site) -> None:
    too_many = pb.DetokenizeRequest(token_ids=[1] * 100_000)
    assert await code_of(site.inference.Detokenize(too_many)) is grpc.StatusCode.INVALID_ARGUMENT
    assert (await site.inference.Detokenize(pb.DetokenizeRequest(token_ids=[300] * 2000))).text


async def test_a_message_above_the_limit_ends_its_call_alone(site: Site) -> None:
    """gRPC says it itself, before anything of ours has seen the message: RESOURCE_EXHAUSTED."""
    async with grpc.aio.insecure_channel(site.address, options=channel_options(64 * MEGABYTES)) as channel:
        send: Any = channel.unary_stream("/quire.v1.Inference/Generate")
        error = await refusal_of(send(bytes(PUBLIC_MESSAGE_BYTES + 1)).read())
        assert isinstance(error_of(error), OverloadedError)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert tokens_in(await site.run(counting(10, 2))) == [11, 12]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0b" * 5000], ids=["no message", "groups within groups"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(site: Site, method: str, data: bytes) -> None:
    async with grpc.aio.insecure_channel(site.address) as channel:
        call: Any = channel.stream_stream(method)()  # the frames of a single request are the same
        await call.write(data)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_the_service_does_not_have_is_unimplemented(site: Site) -> None:
    async with grpc.aio.insecure_channel(site.address) as channel:
        for method in ("/quire.v1.Inference/Generated", "/quire.v2.Inference/Generate", "/x/y", "/"):
            send: Any = channel.unary_unary(method)
            assert await send(b"").code() is grpc.StatusCode.UNIMPLEMENTED


async def test_fields_of_a_newer_client_are_ignored(site: Site) -> None:
    unknown = pb.GenerateRequest.FromString(counting(10, 3).SerializeToString() + b"\xaa\xfa\x01\x03abc")
    assert tokens_in(await site.run(unknown)) == [11, 12, 13]


async def test_requests_from_a_fuzzer_are_refused_in_words_or_served_and_nobody_else_notices(
    site: Site, worker: ScriptedWorker
) -> None:
    going_on = asyncio.create_task(site.run(counting(10, 600)))
    async with grpc.aio.insecure_channel(site.address) as channel:
        raw: Any = channel.unary_stream(
            "/quire.v1.Inference/Generate", response_deserializer=pb.GenerateResponse.FromString
        )
        codes = set()
        for data in fuzz(NUM_FUZZED, seed=5):
            call = raw(data)
            try:
                messages = [message async for message in call]
                assert messages[-1].finished.state == pb.REQUEST_STATE_FINISHED
                codes.add(grpc.StatusCode.OK)
            except grpc.aio.AioRpcError as error:
                codes.add(error.code())
                assert error.details() and len(error.details() or "") < 3000
    # A timeout of 1 ms is a valid one.
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= codes
    # A structured output needs a tokenizer, which the model has not.
    refusals = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED, *refusals}
    assert tokens_in(await going_on) == list(range(11, 611))
    for step in worker.steps:
        for state in step.whole:
            assert all(0 <= each < VOCAB_SIZE for each in unpack_int32(state.token_ids))
    await site.idle()


def test_others_run_while_a_long_text_is_tokenised() -> None:
    """The tokenizer must let go of the interpreter: a service whose loop stands still for seconds is taken for dead."""
    tokenizer = ours(byte_level_json())
    done = threading.Event()

    def tokenise() -> None:
        tokenizer.encode("the quick brown fox " * 20_000, True)
        done.set()

    thread = threading.Thread(target=tokenise)
    thread.start()
    num_turns = 0
    while not done.wait(0.001):
        num_turns += 1
    thread.join()
    assert num_turns > 10


def test_a_context_full_of_the_longest_token_is_within_the_bound_of_a_text() -> None:
    tokenizer = ours(byte_level_json())
    longest = max((tokenizer.decode([each], True) for each in range(480)), key=len)
    limits = ModelLimits(
        vocab_size=480,
        max_model_len=50_000,
        eos_token_ids=frozenset(),
        has_tokenizer=True,
        has_chat_template=False,
        longest_token_chars=tokenizer.longest_token_chars,
    )
    assert 65_536 < 50_000 * len(longest) <= limits.max_text_chars


def test_a_context_of_nothing_but_the_longest_run_of_spaces_is_beyond_the_bound_of_a_text() -> None:
    """A vocabulary of LLaMA 3's kind has a token of 128 spaces: eleven million of them would keep a thread for long."""
    limits = ModelLimits(
        vocab_size=128_000,
        max_model_len=131_072,
        eos_token_ids=frozenset(),
        has_tokenizer=True,
        has_chat_template=True,
        longest_token_chars=128,
    )
    assert limits.max_text_chars == 16 * 131_072
    check_tokenize(pb.TokenizeRequest(text="x" * limits.max_text_chars), limits)
    for request in (
        pb.TokenizeRequest(text=" " * 11_000_000),
        pb.TokenizeRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=" " * 6_000_000)] * 2)),
    ):
        with pytest.raises(InvalidRequestError, match="give at most 2,097,152"):
            check_tokenize(request, limits)
