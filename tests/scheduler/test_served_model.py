"""The served model is what the first worker brought: others fit, lower its limits while they serve, or stay out."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import structlog

from quire.v1 import inference_pb2 as pb
from quire.v1 import worker_pb2
from tests.scheduler.journal_setup import until
from tests.scheduler.mortal_sites import speaking_worker
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


async def model(site: Site) -> pb.GetModelResponse:
    return await site.inference.GetModel(pb.GetModelRequest())


async def with_context(site: Site, worker_id: str, max_model_len: int) -> ScriptedWorker:
    worker = ScriptedWorker(worker_id)
    worker.description.model.max_model_len = max_model_len
    await site.start_worker(worker)
    return worker


async def leave(site: Site, worker: ScriptedWorker) -> None:
    await worker.stop()
    await until(lambda: worker.description.worker_id not in site.workers.members)


async def why_not(site: Site, worker: ScriptedWorker) -> str:
    """Registers a worker that cannot be used, and returns the reason in the log."""
    await worker.start()
    site.on_close(worker.stop)
    with structlog.testing.capture_logs() as logs:
        await site.cluster.Register(worker.registration())
        await until(lambda: worker.description.worker_id not in site.workers.members)
    (reason,) = [line["reason"] for line in logs if line["event"] == "worker not usable"]
    return str(reason)


@pytest.mark.parametrize("lengths", [(1000, 500), (500, 1000)])
async def test_the_context_is_what_every_worker_in_service_can_keep_in_whatever_order_they_come(
    site: Site, lengths: tuple[int, int]
) -> None:
    workers = [await with_context(site, f"w{length}", length) for length in lengths]
    assert (await model(site)).max_model_len == 500
    short, long = workers if lengths[0] == 500 else reversed(workers)
    await leave(site, short)
    assert (await model(site)).max_model_len == 1000
    await leave(site, long)
    assert (await model(site)).max_model_len == 1000, "the last one's, while none is there"


async def test_a_request_longer_than_a_newcomer_takes_stays_with_the_others(site: Site) -> None:
    first = await with_context(site, "first", 1000)
    first.silence_after(2)
    running = asyncio.create_task(site.run(counting(10, 700)))
    await until(lambda: not first.may_answer.is_set())
    short = await with_context(site, "short", 100)
    first.speak_again()
    assert tokens_in(await running) == list(range(11, 711))
    assert not short.steps


async def test_a_worker_without_a_tokenizer_takes_none_from_the_others(site: Site) -> None:
    speaking, mute = speaking_worker("speaking"), ScriptedWorker("mute")
    await site.start_worker(speaking)
    await site.start_worker(mute)
    assert (await model(site)).has_tokenizer
    await leave(site, mute)
    assert (await model(site)).has_tokenizer
    assert (await site.inference.Tokenize(pb.TokenizeRequest(text="hello"))).token_ids


async def test_workers_with_the_same_tokenizer_serve_together(site: Site) -> None:
    for name in ("first", "second"):
        worker = speaking_worker(name)
        worker.description.tokenizer.fingerprint = "0123456789abcdef" * 4
        await site.start_worker(worker)
    assert len(site.workers.members) == 2


async def test_a_worker_with_a_tokenizer_brings_it_to_those_without(site: Site) -> None:
    await site.start_worker(ScriptedWorker("mute"))
    assert not (await model(site)).has_tokenizer
    await site.start_worker(speaking_worker("speaking"))
    assert (await model(site)).has_tokenizer


@pytest.mark.parametrize(("template", "parsers"), [("{{ '<tool_call><think>' }}", ("hermes", "think")), ("", ("", ""))])
async def test_a_model_says_by_its_template_how_its_answers_are_read(
    site: Site, template: str, parsers: tuple[str, str]
) -> None:
    worker = speaking_worker()
    worker.description.tokenizer.chat_template = template
    await site.start_worker(worker)
    said = await model(site)
    assert (said.tool_parser, said.reasoning_parser) == parsers


async def test_another_model_is_refused_with_both_fingerprints(site: Site) -> None:
    await site.add_worker("first")
    other = ScriptedWorker("other")
    other.description.model.fingerprint = "counting-2"
    with pytest.raises(Exception, match="its fingerprint is 'counting-2', and 'counting-1' is served"):
        await site.cluster.Register(other.registration(address="127.0.0.1:1"))


def other_vocabulary(description: worker_pb2.DescribeResponse) -> None:
    description.model.vocab_size = 50


def other_ends(description: worker_pb2.DescribeResponse) -> None:
    description.model.eos_token_ids[:] = [7]


def other_architecture(description: worker_pb2.DescribeResponse) -> None:
    description.model.architecture = "Other"


def other_tokenizer(description: worker_pb2.DescribeResponse) -> None:
    description.tokenizer.fingerprint = "bytes-2"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_vocabulary, "vocab_size is 50, and 100000 is served"),
        (other_ends, r"eos_token_ids is \[7\], and \[99999\] is served"),
        (other_architecture, "architecture is Other, and Counting is served"),
        (other_tokenizer, "tokenizer is bytes-2, and bytes-1 is served"),
    ],
)
async def test_who_says_otherwise_of_the_model_changes_nothing_and_is_told_the_difference(
    site: Site, change: Callable[[worker_pb2.DescribeResponse], None], reason: str
) -> None:
    await site.start_worker(speaking_worker("first"))
    before = await model(site)
    other = speaking_worker("other")
    change(other.description)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(await why_not(site, other))
    assert await model(site) == before
    assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("pool.num_blocks", 0),
        ("pool.num_blocks", 50_000_000),
        ("pool.num_host_blocks", 2**32 - 1),
        ("pool.block_size", 0),
        ("num_seats", 2**32 - 1),
        ("max_batched_tokens", 2**32 - 1),
        ("model.vocab_size", 0),
        ("model.vocab_size", 4_000_000_000),
        ("model.max_model_len", 0),
        ("model.max_model_len", 2**32 - 1),
    ],
)
async def test_figures_beyond_their_bounds_are_refused_by_name(site: Site, path: str, value: int) -> None:
    await site.add_worker("honest")
    worker = ScriptedWorker("boaster")
    *parents, name = path.split(".")
    message = getattr(worker.description, parents[0]) if parents else worker.description
    setattr(message, name, value)
    assert path in await why_not(site, worker)
    assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]


async def test_a_vocabulary_with_an_id_of_4_billion_is_refused_and_not_made_a_table_of(site: Site) -> None:
    worker = speaking_worker("boaster")
    worker.description.tokenizer.tokenizer_json = (
        b'{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":null,'
        b'"post_processor":null,"decoder":null,"model":{"type":"WordLevel","vocab":{"a":0,"b":4000000000},'
        b'"unk_token":"a"}}'
    )
    assert "4,000,000,000" in await why_not(site, worker)


async def test_a_worker_that_serves_the_same_model_otherwise_is_named_with_the_differences(site: Site) -> None:
    first, equal, other = (ScriptedWorker(f"w{number}") for number in range(3))
    for worker in (first, equal):
        worker.description.pool.dtype = "float32"
    other.description.model.name = "renamed"
    other.description.model.dtype = "bfloat16"
    other.description.model.sampling_defaults.top_k = 7
    other.description.pool.dtype = "int8"
    with structlog.testing.capture_logs() as logs:
        for worker in (first, equal, other):
            await site.start_worker(worker)
    found = [line for line in logs if line["event"] == "worker differs from the others"]
    assert [line["worker_id"] for line in found] == ["w2"]
    name, dtype = first.description.model.name, first.description.model.dtype
    assert found[0]["differences"] == (
        f"model name is renamed, and {name} is served; dtype is bfloat16, and {dtype} is served; "
        "sampling defaults is top_k: 7, and none is served; dtype of keys and values is int8, and float32 of others"
    )
    assert (await model(site)).name == name
