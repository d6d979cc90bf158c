"""Setup of the pin tests: calls, prompts that begin with a prefix, and counts of computed tokens."""

from collections.abc import Sequence
from typing import Any

import grpc

from common.arrays import unpack_int32
from quire.v1 import inference_pb2 as pb
from tests.scheduler.refusals import refusal_of
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site

BLOCK = 16
PREFIX = list(range(1000, 1040))  # 40 tokens: two full blocks


def blocks_of(num_blocks: int, start: int = 5000) -> list[int]:
    """Make tokens that fill this many blocks."""
    return list(range(start, start + num_blocks * BLOCK))


def pin_request(token_ids: Sequence[int] = PREFIX, name: str = "system", **fields: Any) -> pb.PinPrefixRequest:
    return pb.PinPrefixRequest(name=name, token_ids=pb.TokenIds(ids=token_ids), **fields)


async def pin(site: Site, token_ids: Sequence[int] = PREFIX, name: str = "system", **fields: Any) -> Any:
    return await site.inference.PinPrefix(pin_request(token_ids, name, **fields))


async def unpin(site: Site, name: str = "system", tenant: str = "") -> None:
    await site.inference.UnpinPrefix(pb.UnpinPrefixRequest(name=name, tenant=tenant))


async def pinned(site: Site, tenant: str = "") -> dict[str, list[str]]:
    """The tenant's pins, and the workers that have them."""
    answer = await site.inference.ListPrefixes(pb.ListPrefixesRequest(tenant=tenant))
    return {each.name: list(each.worker_ids) for each in answer.prefixes}


async def refusal(site: Site, request: pb.PinPrefixRequest, **call: Any) -> tuple[grpc.StatusCode, str]:
    """Code and message with which it is refused."""
    error = await refusal_of(site.inference.PinPrefix(request, **call))
    return error.code(), error.details() or ""


def beginning(prefix: Sequence[int], max_tokens: int = 4, last: int = 70_000, **fields: Any) -> pb.GenerateRequest:
    """A request whose prompt is the prefix and one token more, from which the output counts on."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[*prefix, last]), **fields)
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    request.output.token_ids = True
    return request


async def cached_tokens(site: Site, request: pb.GenerateRequest) -> int:
    """Runs it. Returns how much of its prompt was found computed."""
    messages = await site.run(request)
    return int(messages[-1].finished.usage.cached_tokens)


def num_computed(worker: ScriptedWorker) -> int:
    """Tokens that it computed, in all its steps."""
    counts = [unpack_int32(step.num_tokens) or [1] * len(unpack_int32(step.rows)) for step in worker.steps]
    return sum(sum(each) for each in counts)


def num_pinned_blocks(site: Site) -> dict[str, int]:
    return {each.worker_id: each.num_pinned_blocks for each in site.engine.scheduler.stats().workers}
