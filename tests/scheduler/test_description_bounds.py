"""A worker's description beyond its bounds is refused, by its size and long lists before it is parsed."""

import tracemalloc
from collections.abc import AsyncIterator, Callable

import pytest
import structlog

from quire.v1 import worker_pb2 as pb
from scheduler_svc.workers import description_check
from scheduler_svc.workers.description_check import MAX_DESCRIPTION_BYTES, MAX_TOKENIZER_BYTES, read_description
from tests.scheduler.journal_setup import until
from tests.scheduler.mortal_sites import speaking_worker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in

Change = Callable[[pb.DescribeResponse], object]


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


def described() -> pb.DescribeResponse:
    return speaking_worker().description


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda said: said.startup.extend([pb.PhaseTime()] * 257), "startup has more than 256 items"),
        (
            lambda said: said.tokenizer.special_tokens.update({str(i): "x" for i in range(1025)}),
            "special_tokens has more than 1,024 items",
        ),
        (lambda said: said.model.eos_token_ids.extend(range(257)), "model.eos_token_ids is 258"),
        (lambda said: setattr(said, "worker_id", "x" * 129), "id or fingerprint is 129"),
        (lambda said: setattr(said, "incarnation", "x" * 129), "id or fingerprint is 129"),
        (lambda said: setattr(said.model, "fingerprint", "x" * 129), "id or fingerprint is 129"),
        (lambda said: setattr(said.tokenizer, "fingerprint", "x" * 129), "id or fingerprint is 129"),
        (lambda said: setattr(said, "device", "x" * 1025), "name is 1,025"),
        (lambda said: setattr(said.pool, "block_format", "x" * 257), "pool.block_format is 257"),
        (lambda said: setattr(said.pool, "max_fetched_blocks", (1 << 22) + 1), "pool.max_fetched_blocks is 4,194,305"),
        (lambda said: said.startup.add(phase="x" * 1025), "name is 1,025"),
        (lambda said: said.tokenizer.special_tokens.update({"x" * 1025: ""}), "special token is 1,025"),
        (lambda said: setattr(said.tokenizer, "chat_template", "x" * ((1 << 20) + 1)), "chat_template is 1,048,577"),
    ],
)
def test_each_part_beyond_its_bound_is_named_and_not_repeated(change: Change, named: str) -> None:
    description = described()
    change(description)
    with pytest.raises(ValueError, match=named) as caught:
        read_description(description.SerializeToString())
    assert "xxx" not in str(caught.value)


def test_a_description_at_its_bounds_is_read() -> None:
    description = described()
    description.startup.extend([pb.PhaseTime(phase="p" * 1024)] * 256)
    description.tokenizer.special_tokens.update({str(i): "x" for i in range(1000)})
    description.incarnation = "x" * 128
    description.tokenizer.tokenizer_json = bytes(MAX_TOKENIZER_BYTES)
    assert read_description(description.SerializeToString()) == description


def test_millions_of_empty_items_are_refused_before_they_are_parsed() -> None:
    """Two bytes each; parsed, each took fifty."""
    data = described().SerializeToString() + b"\x4a\x00" * 2_000_000
    tracemalloc.start()
    with pytest.raises(ValueError, match="far too many fields"):
        read_description(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize("data", [b"\xff" * 100, b"\x0a\x05abc", bytes(MAX_DESCRIPTION_BYTES + 1)])
def test_what_is_no_description_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"its bytes are no description|it has .* bytes, and may have"):
        read_description(data)


@pytest.mark.parametrize("num_bytes", [description_check.MAX_TOKENIZER_BYTES + 1, MAX_DESCRIPTION_BYTES + 1])
async def test_a_worker_with_a_tokenizer_beyond_the_bound_is_refused_and_others_serve_on(
    site: Site, num_bytes: int
) -> None:
    """Regression: it was asked again at each registration, and each time the scheduler parsed 128 MiB."""
    await site.add_worker("honest")
    boaster = speaking_worker("boaster")
    boaster.description.tokenizer.tokenizer_json = bytes(num_bytes)
    await boaster.start()
    site.on_close(boaster.stop)
    with structlog.testing.capture_logs() as logs:
        await site.cluster.Register(boaster.registration())
        await until(lambda: "boaster" not in site.workers.members)
    (reason,) = [str(line["reason"]) for line in logs if line["event"] == "worker not usable"]
    assert "cannot be right" in reason
    with pytest.raises(Exception, match="cannot be right"):  # known: it is not asked again
        await site.cluster.Register(boaster.registration())
    assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]
