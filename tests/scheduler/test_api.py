"""The rest of the public face over the wire: tokenising, the model, statistics, and what is not there."""

from collections.abc import AsyncIterator

import grpc
import pytest
from tokenizers import Tokenizer

from quire.v1 import inference_pb2 as pb
from quire.v1 import worker_pb2
from tests.scheduler.refusals import code_of
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in
from tests.scheduler.text_tokenizers import SPECIAL_TOKENS, byte_level_json, ours

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


@pytest.fixture
async def speaking(site: Site) -> Site:
    """A site whose worker has a tokenizer and a chat template."""
    worker = ScriptedWorker()
    worker.description.tokenizer.CopyFrom(
        worker_pb2.TokenizerFiles(
            fingerprint="t1", tokenizer_json=byte_level_json(), chat_template=TEMPLATE, special_tokens=SPECIAL_TOKENS
        )
    )
    await site.start_worker(worker)
    return site


async def test_before_a_worker_came_nothing_is_known_of_the_model(site: Site) -> None:
    stub = site.inference
    assert await code_of(stub.GetModel(pb.GetModelRequest())) is grpc.StatusCode.UNAVAILABLE
    assert await code_of(stub.Tokenize(pb.TokenizeRequest(text="x"))) is grpc.StatusCode.UNAVAILABLE
    assert await code_of(stub.Detokenize(pb.DetokenizeRequest())) is grpc.StatusCode.UNAVAILABLE
    stats = await stub.GetStats(pb.GetStatsRequest())
    assert not stats.workers and stats.journal.entries == 2  # that it leads, and that it serves


async def test_a_model_without_a_tokenizer_takes_token_ids_only(site: Site) -> None:
    await site.add_worker()
    model = await site.inference.GetModel(pb.GetModelRequest())
    assert (model.name, model.has_tokenizer, model.has_chat_template) == ("counting", False, False)
    for call in (
        site.inference.Tokenize(pb.TokenizeRequest(text="x")),
        site.inference.Detokenize(pb.DetokenizeRequest(token_ids=[1])),
    ):
        assert await code_of(call) is grpc.StatusCode.FAILED_PRECONDITION
    assert await code_of(site.run(pb.GenerateRequest(text="hello"))) is grpc.StatusCode.FAILED_PRECONDITION


async def test_text_becomes_the_tokens_of_a_prompt_and_comes_back(speaking: Site) -> None:
    stub = speaking.inference
    answer = await stub.Tokenize(pb.TokenizeRequest(text="The quick fox"))
    assert list(answer.token_ids) == ours(byte_level_json()).encode("The quick fox", True)
    assert answer.tokens[0] == "<s>" and len(answer.tokens) == len(answer.token_ids)
    messages = await speaking.run(pb.GenerateRequest(text="The quick fox", stopping=pb.StoppingParams(max_tokens=1)))
    assert messages[0].accepted.num_prompt_tokens == len(answer.token_ids)
    bare = await stub.Tokenize(pb.TokenizeRequest(text="The quick fox", add_special_tokens=False))
    assert list(bare.token_ids) == list(answer.token_ids)[1:]
    text = await stub.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))
    assert text.text == "The quick fox"
    text = await stub.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids, keep_special_tokens=True))
    assert text.text.startswith("<s>")


async def test_a_conversation_becomes_the_tokens_that_a_request_with_it_has(speaking: Site) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="dog")])
    answer = await speaking.inference.Tokenize(pb.TokenizeRequest(chat=chat))
    request = counting(0, 2)
    request.chat.CopyFrom(chat)
    messages = await speaking.run(request)
    assert messages[0].accepted.num_prompt_tokens == len(answer.token_ids) > 3


async def test_text_with_a_token_that_the_model_does_not_have_is_refused_and_no_worker_hears_of_it(site: Site) -> None:
    tokenizer = Tokenizer.from_buffer(byte_level_json())
    added, first = "<added>", tokenizer.get_vocab_size()
    tokenizer.add_tokens([added])
    worker = ScriptedWorker()
    worker.description.model.vocab_size = first
    worker.description.tokenizer.CopyFrom(
        worker_pb2.TokenizerFiles(
            fingerprint="t1",
            tokenizer_json=tokenizer.to_str().encode(),
            chat_template=TEMPLATE,
            special_tokens=SPECIAL_TOKENS,
        )
    )
    await site.start_worker(worker)
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=added)])
    short = pb.StoppingParams(max_tokens=1)
    for request in (
        pb.GenerateRequest(text=f"dog {added}", stopping=short),
        pb.GenerateRequest(chat=chat, stopping=short),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=f"prompt: has a token .* {first}; its ids end at {first - 1}"):
            await site.run(request)
    pin = pb.PinPrefixRequest(name="p", text=f"{added} dog" * 20)
    with pytest.raises(grpc.aio.AioRpcError, match=f"its ids end at {first - 1}"):
        await site.inference.PinPrefix(pin)
    assert not worker.steps
    assert await site.run(pb.GenerateRequest(text="dog", stopping=short))


async def test_wrong_input_is_named_by_its_field(speaking: Site) -> None:
    stub = speaking.inference
    with pytest.raises(grpc.aio.AioRpcError, match="input: is missing") as caught:
        await stub.Tokenize(pb.TokenizeRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match=r"token_ids\[1\]") as caught:
        await stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, -7]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_tokenizer_that_cannot_be_read_keeps_its_worker_out(site: Site) -> None:
    worker = ScriptedWorker()
    worker.description.tokenizer.CopyFrom(worker_pb2.TokenizerFiles(fingerprint="bad", tokenizer_json=b"{"))
    await worker.start()
    site.on_close(worker.stop)
    await site.cluster.Register(worker.registration())
    await site.until_nobody_is_left()
    with pytest.raises(grpc.aio.AioRpcError, match="cannot be read"):  # known without a look
        await site.cluster.Register(worker.registration())
    assert site.changes == [] and site.admission.model is None


async def test_a_second_worker_need_not_send_the_tokenizer_again(speaking: Site) -> None:
    second = ScriptedWorker("w2")
    second.description.tokenizer.CopyFrom(worker_pb2.TokenizerFiles(fingerprint="t1"))
    await speaking.start_worker(second)
    answer = await speaking.inference.Tokenize(pb.TokenizeRequest(text="dog"))
    assert answer.token_ids


async def test_a_stop_string_ends_a_request_where_it_appears(speaking: Site) -> None:
    tokenizer = ours(byte_level_json())
    stop = tokenizer.decode([44, 45], False)
    assert len(stop) == 2
    request = counting(40, 30)
    request.stopping.stop.append(stop)
    messages = await speaking.run(request)
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    assert tokens_in(messages) == [41, 42, 43, 44, 45]
    assert "".join(chunk.text for chunk in chunks) == tokenizer.decode([41, 42, 43], False)
    assert (chunks[-1].finish.reason, chunks[-1].finish.stop_string) == (pb.FINISH_REASON_STOP, stop)
    await speaking.idle()


async def test_a_stop_string_that_is_complete_only_with_what_was_held_back_ends_the_request(speaking: Site) -> None:
    tokenizer = ours(byte_level_json())
    (tilde,) = tokenizer.encode("~", False)
    assert tokenizer.decode([tilde, tilde + 1], False) == "~\ufffd", "the byte behind it begins no character"
    request = counting(tilde - 1, 2)
    request.stopping.stop.append("~\ufffd")
    messages = await speaking.run(request)
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    assert tokens_in(messages) == [tilde, tilde + 1]
    assert "".join(chunk.text for chunk in chunks) == ""
    assert (chunks[-1].finish.reason, chunks[-1].finish.stop_string) == (pb.FINISH_REASON_STOP, "~\ufffd")
    await speaking.idle()
