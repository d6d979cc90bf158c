"""PinPrefix, UnpinPrefix, ListPrefixes over the wire: what they take, share, refuse, and leave behind."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from common.arrays import pack_int32
from quire.v1 import inference_pb2 as pb
from quire.v1 import worker_pb2
from scheduler_svc.core.isolation import MAX_FAILED_STEPS
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import until
from tests.scheduler.pinning import (
    PREFIX,
    beginning,
    blocks_of,
    cached_tokens,
    num_computed,
    num_pinned_blocks,
    pin,
    pin_request,
    pinned,
    refusal,
    unpin,
)
from tests.scheduler.refusals import code_of, refusal_of, retry_delay_s
from tests.scheduler.scripted_worker import Answer, ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in
from tests.scheduler.text_tokenizers import SPECIAL_TOKENS, byte_level_json, ours

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


async def test_a_prefix_is_computed_once_and_found_by_requests_that_begin_with_it(site: Site) -> None:
    worker = await site.add_worker()
    answer = await pin(site)
    assert answer.created
    assert answer.prefix == pb.PinnedPrefix(name="system", num_tokens=32, num_blocks=2, worker_ids=["w1"])
    assert num_computed(worker) == 32  # nothing of the half block, and no token behind it
    stats = await site.inference.GetStats(pb.GetStatsRequest())
    assert stats.workers[0].blocks.pinned == stats.workers[0].blocks.used == 2
    assert (stats.num_admitted, stats.num_finished, stats.output_tokens) == (0, 0, 0)

    messages = await site.run(beginning(PREFIX))
    assert tokens_in(messages) == [70_001, 70_002, 70_003, 70_004]
    assert messages[-1].finished.usage.cached_tokens == 32
    assert await cached_tokens(site, beginning(PREFIX[:20])) == 16
    assert await cached_tokens(site, counting(10)) == 0
    await site.idle()
    await unpin(site)
    assert num_pinned_blocks(site) == {"w1": 0}
    assert await pinned(site) == {}
    await site.idle()


async def test_the_same_again_is_the_pin_that_is_there_and_another_is_refused(site: Site) -> None:
    worker = await site.add_worker()
    first = await pin(site, cache_salt="pepper")
    again = await pin(site, cache_salt="pepper")
    assert (first.created, again.created) == (True, False)
    assert again.prefix == first.prefix
    assert num_computed(worker) == 32
    for other in (pin_request(), pin_request(PREFIX[:-1], cache_salt="pepper")):
        code, message = await refusal(site, other)
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert "unpin that one" in message
    assert (await pin(site, PREFIX, "second", cache_salt="pepper")).created
    assert num_computed(worker) == 32  # all cached: nothing is computed
    assert num_pinned_blocks(site) == {"w1": 2}  # held by both
    await unpin(site)
    assert num_pinned_blocks(site) == {"w1": 2}
    assert await code_of(unpin(site)) is grpc.StatusCode.NOT_FOUND


async def test_two_who_ask_at_once_share_one_computation(site: Site) -> None:
    worker = await site.add_worker()
    answers = await asyncio.gather(*(pin(site) for _ in range(5)), return_exceptions=False)
    assert sorted(each.created for each in answers) == [False] * 4 + [True]
    assert num_computed(worker) == 32
    assert await pinned(site) == {"system": ["w1"]}


async def test_tenants_and_salts_share_neither_names_nor_blocks(site: Site) -> None:
    worker = await site.add_worker()
    await pin(site, tenant="acme")
    await pin(site, cache_salt="pepper")
    assert num_computed(worker) == 64
    assert (await pinned(site), await pinned(site, "acme"), await pinned(site, "other")) == (
        {"system": ["w1"]},
        {"system": ["w1"]},
        {},
    )
    assert await cached_tokens(site, beginning(PREFIX)) == 0
    assert await cached_tokens(site, beginning(PREFIX, cache_salt="pepper")) == 32
    assert await cached_tokens(site, beginning(PREFIX, tenant="acme")) == 32
    with pytest.raises(grpc.aio.AioRpcError, match="no prefix is pinned as"):
        await unpin(site, tenant="other")
    await unpin(site, tenant="acme")
    assert (await pinned(site), await pinned(site, "acme")) == ({"system": ["w1"]}, {})


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pin_request(name=""), "name"),
        (pin_request(name="a/b"), "name"),
        (pin_request(name="a" * 129), "name"),
        (pin_request(tenant="t" * 129), "tenant"),
        (pin_request(cache_salt="s" * 129), "cache_salt"),
        (pb.PinPrefixRequest(name="system"), "prefix"),
        (pin_request([]), "token_ids.ids"),
        (pin_request([*PREFIX, 100_000]), r"token_ids.ids[40]"),
        (pin_request([1] * 65_536), "token_ids.ids"),
        (pin_request(PREFIX[:15]), "prefix"),
        (pin_request([1] * 65_535), "prefix"),
    ],
)
async def test_a_bad_request_is_refused_by_its_field(site: Site, request_: pb.PinPrefixRequest, field: str) -> None:
    await site.add_worker()
    code, message = await refusal(site, request_)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith(f"{field}: ")
    assert await pinned(site) == {}


async def test_text_and_chats_are_the_tokens_that_prompts_have(site: Site) -> None:
    worker = ScriptedWorker()
    worker.description.tokenizer.CopyFrom(
        worker_pb2.TokenizerFiles(
            fingerprint="t1", tokenizer_json=byte_level_json(), chat_template=TEMPLATE, special_tokens=SPECIAL_TOKENS
        )
    )
    await site.start_worker(worker)
    text = "The quick brown fox jumps over the lazy dog, " * 4
    num_text = len(ours(byte_level_json()).encode(text, True)) // 16 * 16
    answer = await site.inference.PinPrefix(pb.PinPrefixRequest(name="text", text=text))
    assert answer.prefix.num_tokens == num_text > 0
    assert await cached_tokens(site, pb.GenerateRequest(text=text + "and so on, for ever and ever")) == num_text

    system = pb.ChatMessage(role="system", content=text)
    chat = pb.ChatPrompt(messages=[system])
    answer = await site.inference.PinPrefix(pb.PinPrefixRequest(name="chat", chat=chat))
    chat.messages.add(role="user", content="dog" * 20)
    assert await cached_tokens(site, pb.GenerateRequest(chat=chat)) == answer.prefix.num_tokens > 0
    opening = pb.ChatPrompt(messages=[system], add_generation_prompt=True)
    code, _ = await refusal(site, pb.PinPrefixRequest(name="chat", chat=opening))
    assert code is grpc.StatusCode.ALREADY_EXISTS  # other tokens


async def test_a_text_that_fills_the_context_of_the_model_is_refused(site: Site) -> None:
    worker = ScriptedWorker()
    worker.description.model.max_model_len = 64
    worker.description.tokenizer.CopyFrom(
        worker_pb2.TokenizerFiles(fingerprint="t1", tokenizer_json=byte_level_json(), special_tokens=SPECIAL_TOKENS)
    )
    await site.start_worker(worker)
    text = "\x01" * 63  # and a token at the beginning
    assert len(ours(byte_level_json()).encode(text, True)) == 64
    code, message = await refusal(site, pb.PinPrefixRequest(name="system", text=text))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "has 64 tokens; the model's context holds 64, the output included" in message
    assert await pinned(site) == {}
    assert (await site.inference.PinPrefix(pb.PinPrefixRequest(name="system", text=text[1:]))).prefix.num_tokens == 48


async def test_a_model_without_a_tokenizer_pins_token_ids_only(site: Site) -> None:
    await site.add_worker()
    code, message = await refusal(site, pb.PinPrefixRequest(name="system", text="hello"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "token_ids" in message


async def test_without_a_prefix_cache_there_are_no_pins() -> None:
    async with running_site(prefix_cache=False) as site:
        await site.add_worker()
        code, message = await refusal(site, pin_request())
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "prefix_cache" in message


async def test_without_a_worker_a_pin_is_to_be_asked_for_again(site: Site) -> None:
    for is_model_known in (False, True):
        if is_model_known:
            worker = await site.add_worker()
            await worker.stop()
            await site.until_nobody_is_left()
        error = await refusal_of(pin(site))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert retry_delay_s(error) == 1.0
    assert await pinned(site) == {}


async def test_a_prefix_must_leave_room_for_a_request_that_begins_with_it(site: Site) -> None:
    await site.add_worker(num_blocks=20)  # 9 blocks, 9 beside them, and 1 for what follows
    code, message = await refusal(site, pin_request(blocks_of(10)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 144" in message
    await pin(site, blocks_of(9))
    assert await cached_tokens(site, beginning(blocks_of(9))) == 144
    await unpin(site)

    await pin(site, blocks_of(5), "first")
    code, message = await refusal(site, pin_request(blocks_of(8, 9000)))  # of 15 blocks there may be 7
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "unpin" in message
    code, _ = await refusal(site, pin_request(blocks_of(10, 9000)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    await pin(site, blocks_of(7, 9000))
    assert num_pinned_blocks(site) == {"w1": 12}
    code, _ = await code_and_text(
        site, beginning(blocks_of(8, 20_000))
    )  # a new request fits beside them, or is refused
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await site.idle()


async def code_and_text(site: Site, request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    error = await refusal_of(site.run(request))
    return error.code(), error.details() or ""


async def test_memory_that_was_promised_to_a_request_is_not_pinned(site: Site) -> None:
    worker = await site.add_worker(num_blocks=20)
    request = asyncio.create_task(site.run(counting(10, 280)))  # 281 tokens at its end: 18 blocks
    await until(lambda: len(worker.steps) > 3)
    worker.may_answer.clear()
    asking = asyncio.create_task(refusal(site, pin_request(blocks_of(3))))
    await until(lambda: site.keeper.find("", "system") is not None)
    worker.may_answer.set()
    code, message = await asking
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "unpin another prefix" in message
    assert await pinned(site) == {}
    assert tokens_in(await request) == list(range(11, 291))
    assert (await pin(site, blocks_of(3))).created
    await site.idle()


async def test_memory_is_promised_to_a_request_before_the_queue_knows_it() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        await site.add_worker(num_blocks=20)
        await pin(site, blocks_of(3), "computed")
        await unpin(site, "computed")
        store.may_append.clear()
        request = asyncio.create_task(site.run(counting(10, 280)))  # 18 blocks
        await until(lambda: store.num_waiting == 1)
        code, message = await refusal(site, pin_request(blocks_of(3)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "being admitted" in message
        assert num_pinned_blocks(site) == {"w1": 0}
        pinning = asyncio.create_task(pin(site, blocks_of(2)))  # 18 are left
        await until(lambda: num_pinned_blocks(site) == {"w1": 2})
        store.may_append.set()
        assert (await pinning).created
        assert tokens_in(await request) == list(range(11, 291))
        await site.idle()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_who_gives_up_leaves_nothing_behind(site: Site, how: str) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    call = site.inference.PinPrefix(pin_request(), timeout=None if how == "cancel" else 0.2)
    await until(lambda: len(worker.steps) == 1)
    assert await pinned(site) == {"system": []}
    if how == "cancel":
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    else:
        assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not site.engine.sampling_of)
    assert await pinned(site) == {}
    worker.may_answer.set()
    assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]
    await site.idle()
    assert num_pinned_blocks(site) == {"w1": 0}


async def test_one_who_gives_up_does_not_take_it_from_another_who_waits(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    first = site.inference.PinPrefix(pin_request())
    await until(lambda: len(worker.steps) == 1)
    second = asyncio.create_task(pin(site))
    prefix = site.keeper.find("", "system")
    assert prefix is not None
    await until(lambda: len(prefix.waiters) == 2)
    first.cancel()
    await until(lambda: len(prefix.waiters) == 1)
    worker.may_answer.set()
    assert list((await second).prefix.worker_ids) == ["w1"]
    assert num_computed(worker) == 32


async def test_a_prefix_can_be_unpinned_while_it_is_computed(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    asking = asyncio.create_task(refusal(site, pin_request()))
    await until(lambda: len(worker.steps) == 1)
    await unpin(site)
    code, message = await asking
    assert code is grpc.StatusCode.CANCELLED
    assert "unpinned" in message
    worker.may_answer.set()
    await site.idle()
    assert await pinned(site) == {}


async def test_steps_that_fail_again_and_again_fail_the_pin_and_no_request(site: Site) -> None:
    worker = await site.add_worker()
    worker.refuse(worker_pb2.STEP_STATUS_FAILED, times=MAX_FAILED_STEPS)
    code, message = await refusal(site, pin_request())
    assert code is grpc.StatusCode.INTERNAL
    assert "made the model fail in 3 attempts" in message
    assert await pinned(site) == {}
    assert (await pin(site)).created
    worker.refuse(worker_pb2.STEP_STATUS_FAILED, times=MAX_FAILED_STEPS - 1)
    assert (await pin(site, blocks_of(2), "other")).created
    await site.idle()


async def test_logits_that_are_not_finite_are_not_pinned(site: Site) -> None:
    worker = await site.add_worker()

    def script(request: worker_pb2.StepRequest) -> Answer:
        response = worker.execute(request)
        response.invalid_samples = pack_int32([0])
        return response

    worker.script = script
    code, message = await refusal(site, pin_request())
    assert code is grpc.StatusCode.INTERNAL
    assert "not finite" in message
    worker.script = worker.execute
    await site.idle()
    assert num_pinned_blocks(site) == {"w1": 0}


async def test_prefixes_are_computed_among_requests_that_are_none_the_wiser() -> None:
    async with running_site(preempt_every=3) as site:
        await site.add_worker(num_blocks=200)
        prefixes = {f"p{i}": blocks_of(3, 5000 + 100 * i) for i in range(8)}
        running = [asyncio.create_task(site.run(counting(1000 * i, 40))) for i in range(8)]
        pins = [asyncio.create_task(pin(site, ids, name)) for name, ids in prefixes.items()]
        for i, messages in enumerate(await asyncio.gather(*running)):
            assert tokens_in(messages) == list(range(1000 * i + 1, 1000 * i + 41))
        assert all(each.created for each in await asyncio.gather(*pins))
        assert num_pinned_blocks(site) == {"w1": 24}
        for ids in prefixes.values():
            assert await cached_tokens(site, beginning(ids)) == 48
        await site.idle()


async def test_the_end_of_the_service_waits_for_no_computation(site: Site) -> None:
    worker = await site.add_worker()
    await pin(site, blocks_of(2), "kept")
    worker.may_answer.clear()
    asking = asyncio.create_task(refusal(site, pin_request()))
    await until(lambda: site.keeper.find("", "system") is not None)
    site.keeper.close()
    code, message = await asking
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in message
    assert await refusal(site, pin_request()) == (code, message)
    await site.admission.close()
    await site.engine.wait_until_empty()
    assert not site.engine.sampling_of
    assert (await refusal(site, pin_request()))[0] is grpc.StatusCode.UNAVAILABLE
    assert await pinned(site) == {"kept": ["w1"]}
    worker.may_answer.set()
