"""Fuzzed messages to every RPC of real services: documented statuses, no traceback, no memory left behind."""

import asyncio
import itertools

import grpc
import pytest

from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from tests.chaos_input.every_rpc import SCHEDULER, WORKER, Report, calls, fuzz_scheduler, fuzz_worker
from tests.hostile.besieged import MIB, besieged_scheduler

NUM_INPUTS = 500
NUM_LOOKUPS = 24
NAME_BYTES = 15 * MIB
MOST_LEFT_BYTES = 48 * MIB


def check(report: Report, methods: set[str]) -> None:
    assert not report.undocumented
    assert methods <= {each.split()[0] for each in report.answers}, "not every method was called"
    assert report.resident_after < report.resident_before + MOST_LEFT_BYTES


def methods_of(services: list[object]) -> set[str]:
    return {method.name for service in services for method in service.methods}  # type: ignore[attr-defined]


@pytest.mark.long
async def test_every_rpc_of_the_scheduler_answers_any_message_as_documented_and_a_neighbour_notices_nothing() -> None:
    report = await fuzz_scheduler(NUM_INPUTS, seed=17)
    check(report, methods_of(list(SCHEDULER)))
    served = {"Generate OK", "Tokenize OK", "PinPrefix OK", "Session OK"}
    assert served <= set(report.answers), "too little of what was sent was let in"


@pytest.mark.long
async def test_every_rpc_of_a_worker_answers_any_message_as_documented() -> None:
    report = await fuzz_worker(NUM_INPUTS // 4, seed=12)
    check(report, methods_of(list(WORKER)))
    assert {"Step OK", "StepStream OK"} <= set(report.answers)


def test_the_same_seed_makes_the_same_calls() -> None:
    first, again = (list(itertools.islice(calls(SCHEDULER, 200, seed=3), 100)) for _ in "12")
    assert first == again != list(itertools.islice(calls(SCHEDULER, 200, seed=4), 100))


@pytest.mark.long
async def test_names_of_15_megabytes_leave_no_memory_behind() -> None:
    """Sixty of them took a scheduler from 120 MB to 2 GB: each answer repeated the name."""
    async with besieged_scheduler() as site:
        request = pb.GetRequestRequest(request_id="n" * NAME_BYTES)
        codes = set()
        async with grpc.aio.insecure_channel(
            site.address, options=[("grpc.max_send_message_length", 16 * MIB)]
        ) as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)

            async def look_up() -> None:
                try:
                    await stub.GetRequest(request)
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code())
                    assert len(error.details() or "") < 300

            await asyncio.gather(*(look_up() for _ in range(4)))
            before = site.resident_bytes  # with what the allocator keeps of four that are there at once
            for _ in range(NUM_LOOKUPS // 4 - 1):
                await asyncio.gather(*(look_up() for _ in range(4)))
        assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
        assert await site.until_resident_below(before + MOST_LEFT_BYTES) < before + MOST_LEFT_BYTES
        await site.neighbour.until_answered(5)
        assert not site.neighbour.failures
