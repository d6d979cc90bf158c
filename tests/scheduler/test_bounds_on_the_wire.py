"""Bounds of requests as clients meet them: refused by field on every RPC, with nothing of it kept, copied or echoed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from common.rpc import Keepalive
from quire.errors import InvalidRequestError, from_status
from quire.rpc import error_of
from quire.v1 import cluster_pb2
from quire.v1 import inference_pb2 as pb
from scheduler_svc.journal.memory_store import MemoryStore
from tests.bounded_fields import beyond, bounded_paths, message_at
from tests.patience import patient
from tests.scheduler.journal_setup import entries_of
from tests.scheduler.raw_session import RawSession
from tests.scheduler.refusals import refusal_of
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in

MEGABYTES = 1024 * 1024
LARGE = [("grpc.max_send_message_length", 16 * MEGABYTES)]  # and no keepalive: a busy machine is slow with so much
SERVICES = [*pb.DESCRIPTOR.services_by_name.values(), *cluster_pb2.DESCRIPTOR.services_by_name.values()]
METHODS = {
    f"/{service.full_name}/{method.name}": method.input_type for service in SERVICES for method in service.methods
}
BOUNDED = {method: found for method, each in METHODS.items() if (found := list(bounded_paths(each)))}
ON_STREAMS = "/quire.v1.Inference/Session"
NAMED = pb.ChatMessage(role="user", content="x", name="a")
UNKNOWN = b"\xaa\xfa\x01\x83\x80\x04" + b"u" * 65_539  # field 4005


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site(keepalive=Keepalive(time_s=60, timeout_s=60)) as made:
        await made.add_worker()
        yield made


@pytest.mark.parametrize("method", sorted(set(BOUNDED) - {ON_STREAMS}))
async def test_every_rpc_refuses_what_is_beyond_its_bound_and_repeats_nothing_of_it(site: Site, method: str) -> None:
    async with grpc.aio.insecure_channel(site.address, options=LARGE) as channel:
        call: Any = channel.unary_unary(method)
        for path, field in BOUNDED[method]:
            message, shown = message_at(METHODS[method], path, field, beyond(field, by=1))
            error = error_of(await refusal_of(call(message.SerializeToString())))
            assert isinstance(error, InvalidRequestError)
            assert [each.field for each in error.violations] == [shown]
            assert len(error.message) < 200
    assert tokens_in(await site.run(counting(10, 2))) == [11, 12]


async def test_a_name_of_15_megabytes_is_not_echoed_by_any_lookup(site: Site) -> None:
    """Before names were bounded on lookups, each answer repeated it."""
    name = "n" * 15 * MEGABYTES
    lookups: dict[str, Any] = {
        "Inference/GetRequest": pb.GetRequestRequest(request_id=name),
        "Inference/Cancel": pb.CancelRequest(request_id=name),
        "Inference/Pause": pb.PauseRequest(request_id=name),
        "Inference/Resume": pb.ResumeRequest(request_id=name),
        "Inference/DeleteRecord": pb.DeleteRecordRequest(request_id=name),
        "Inference/UnpinPrefix": pb.UnpinPrefixRequest(name=name),
        "Inference/ListPrefixes": pb.ListPrefixesRequest(tenant=name),
        "Cluster/DrainWorker": cluster_pb2.DrainWorkerRequest(worker_id=name),
    }
    async with grpc.aio.insecure_channel(site.address, options=LARGE) as channel:
        for method, request in lookups.items():
            call: Any = channel.unary_unary(f"/quire.v1.{method}")
            error = await refusal_of(call(request.SerializeToString()))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert len(error.details() or "") < 200


async def test_on_a_session_what_is_beyond_a_bound_is_an_event_of_its_handle_and_the_others_go_on(site: Site) -> None:
    session = RawSession(site)
    await session.say(1, submit=counting(10, 50))
    refused: dict[int, tuple[str, dict[str, Any]]] = {
        2: ("tenant", {"submit": counting(20, 2, tenant="t" * 129)}),
        3: ("request_id", {"attach": pb.Attach(request_id="r" * 129)}),
        4: ("from_positions", {"attach": pb.Attach(request_id="r", from_positions=[0] * 129)}),
        5: (
            "chat.messages",  # seen before it is parsed
            {"submit": pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage()] * 70_000))},
        ),
        6: (
            "chat.messages",  # not longer than permitted, but of too many fields in all
            {"submit": pb.GenerateRequest(chat=pb.ChatPrompt(messages=[NAMED] * 65_536))},
        ),
    }
    for handle, (_, action) in refused.items():
        await session.say(handle, **action)
    for handle, (field, _) in refused.items():
        event = await session.read_until("error", handle)
        error = from_status(status_pb2.Status.FromString(event.error.status))
        assert isinstance(error, InvalidRequestError) and [each.field for each in error.violations] == [field]
    await session.say(7, submit=counting(30, 3))
    for handle in (1, 7):
        await session.read_until("finished", handle)
    assert session.tokens(1) == list(range(11, 61)) and session.tokens(7) == [31, 32, 33]
    await session.close()


async def test_nothing_of_unknown_fields_and_no_prompt_text_is_journaled() -> None:
    """The record of a request is bounded by its known fields; the prompt's tokens replace its text."""
    store = MemoryStore()
    async with running_site(store) as site:
        await site.add_worker()
        data = counting(10, 3, "known").SerializeToString() + UNKNOWN
        async with grpc.aio.insecure_channel(site.address) as channel:
            call: Any = channel.unary_stream(
                "/quire.v1.Inference/Generate", response_deserializer=pb.GenerateResponse.FromString
            )
            messages = [message async for message in call(data)]
        assert tokens_in(messages) == [11, 12, 13]
        again = await site.run(counting(10, 3, "known"))  # without them it is the same request
        assert again[0].accepted.attached
        await site.idle()
        entries = [entry for _, entry in await entries_of(store)]
        admissions = [admission for entry in entries for admission in entry.admissions]
        assert [each.request.request_id for each in admissions] == ["known"]
        assert all(each.request.WhichOneof("prompt") is None for each in admissions)
        assert sum(entry.ByteSize() for entry in entries) < 2000


async def test_an_unknown_field_in_a_message_of_a_session_is_dropped(site: Site) -> None:
    session = RawSession(site)
    submit = pb.SessionRequest(handle=1, submit=counting(10, 3)).SerializeToString()
    await session.call.write(submit + UNKNOWN)
    async with asyncio.timeout(patient(20)):
        await session.read_until("finished", 1)
    assert session.tokens(1) == [11, 12, 13]
    await session.close()
