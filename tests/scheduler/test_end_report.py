"""The log's line of a request that has ended, and what GetStats makes of it."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

from structlog.testing import capture_logs

from quire.v1 import inference_pb2 as pb
from tests.scheduler.journal_setup import until
from tests.scheduler.serving_site import counting, running_site

Line = MutableMapping[str, Any]


def ended(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["event"] == "request ended"]


async def test_it_tells_how_long_a_request_took_how_much_it_was_and_why_it_ended() -> None:
    with capture_logs() as lines:
        async with running_site() as site:
            await site.add_worker("w7")
            await site.run(counting(10, 5, "first", tenant="acme"))
            stats = await site.inference.GetStats(pb.GetStatsRequest())
    [line] = ended(lines)
    assert {name: line[name] for name in ("request_id", "state", "reason", "tenant", "worker")} == {
        "request_id": "first",
        "state": "REQUEST_STATE_FINISHED",
        "reason": "length",
        "tenant": "acme",
        "worker": "w7",
    }
    assert (line["prompt_tokens"], line["output_tokens"]) == (1, 5)
    assert 0 <= line["queue_ms"] <= line["first_token_ms"] <= line["total_ms"]
    # four intervals follow the first token
    assert abs(line["first_token_ms"] + 4 * line["token_ms"] - line["total_ms"]) < 0.01 or line["token_ms"] == 0
    assert "error" not in line and "cached_tokens" not in line
    assert stats.latency.num_requests == 1
    assert round(stats.latency.first_token_p50_ns / 1e6, 3) == line["first_token_ms"]
    assert round(stats.latency.token_p99_ns / 1e6, 3) == line["token_ms"]


async def test_it_tells_of_prompt_tokens_that_were_found_in_the_cache() -> None:
    with capture_logs() as lines:
        async with running_site() as site:
            await site.add_worker()
            for name in ("cold", "warm"):
                request = pb.GenerateRequest(request_id=name, token_ids=pb.TokenIds(ids=range(1, 41)))
                request.stopping.max_tokens = 2
                await site.run(request)
    assert [line.get("cached_tokens") for line in ended(lines)] == [None, 32]  # two whole blocks of 16


async def test_a_request_that_was_cancelled_before_it_ran_has_no_worker_and_no_latency() -> None:
    with capture_logs() as lines:
        async with running_site() as site:
            worker = await site.add_worker(num_seats=1)
            worker.may_answer.clear()
            first = asyncio.create_task(site.run(counting(10, 5, "first")))
            await until(lambda: bool(worker.steps))
            second = asyncio.create_task(site.run(counting(20, 5, "second")))
            await until(lambda: "second" in site.engine.live)
            await site.inference.Cancel(pb.CancelRequest(request_id="second"))
            worker.may_answer.set()
            await asyncio.gather(first, second, return_exceptions=True)
            stats = await site.inference.GetStats(pb.GetStatsRequest())
    line = next(line for line in ended(lines) if line["request_id"] == "second")
    assert (line["state"], line["reason"], line["output_tokens"]) == ("REQUEST_STATE_CANCELLED", "cancelled", 0)
    assert not {"worker", "queue_ms", "first_token_ms", "token_ms", "tenant"} & set(line)
    assert line["total_ms"] >= 0
    assert stats.latency.num_requests == 1, "only the one with output counts"
