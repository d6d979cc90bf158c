"""A double of the scheduler's public face: a real gRPC server that implements `Inference` by a script.

A test says how many tokens there are, how many are out already, what is refused, and when the session breaks; it
can wait for what the client said. Requests outlive their sessions. How an output reads: `scripted_run.py`.
"""

import asyncio
import operator
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.health import HealthServicer
from common.rpc import EdgeInterceptor, server_options
from quire.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    FieldViolation,
    InvalidRequestError,
    NotFoundError,
    QuireError,
    UnavailableError,
    to_status,
)
from quire.rpc import PUBLIC_MESSAGE_BYTES
from quire.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from quire.v1 import inference_pb2 as pb
from tests.patience import patient
from tests.quire.scripted_prefixes import ScriptedPrefixes
from tests.quire.scripted_run import ALL, Run, Script
from tests.unreadable_answers import Unreadable


class RefusingHealth(HealthServicer):
    """Health of a server that answers looks with these refusals, until there are none left."""

    def __init__(self, refusals: list[QuireError]) -> None:
        super().__init__()
        self._refusals = refusals

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if self._refusals:
            raise self._refusals.pop(0)
        return await super().Check(request, context)


class ScriptedServer(inference_pb2_grpc.InferenceServicer, cluster_pb2_grpc.ClusterServicer):
    """The server; `scripts` are by prompt text, `default` is for every other prompt."""

    def __init__(self) -> None:
        self.default = Script()
        self.scripts: dict[str, Script] = {}
        self.runs: dict[str, Run] = {}
        self.received: list[tuple[str, str]] = []  # (action, request_id), over all sessions
        self.attached_at: list[list[int]] = []  # positions of each submission (none) and attachment
        self.listings: list[pb.ListRequestsRequest] = []
        self.num_sessions = 0
        self.num_looks = 0  # at the statistics
        self.may_answer = asyncio.Event()  # calls for them
        self.may_answer.set()
        self.may_tell_shards = asyncio.Event()
        self.may_tell_shards.set()
        self.may_end_shards = asyncio.Event()  # the stream that tells of them
        self.may_end_shards.set()
        self.refuse_calls: list[QuireError] = []
        self.prefixes = ScriptedPrefixes()
        self.is_draining = False  # its one worker, w0
        self.num_shards_wanted = 1
        self.epoch = 1
        self.num_unreadable: Counter[str] = Counter()  # answers to come that no client can read, by method
        self.address = ""
        self._sessions: set[ScriptedSession] = set()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self.refuse_health: list[QuireError] = []  # looks at it, which the first of these are answers to
        self._health = RefusingHealth(self.refuse_health)
        self._health.set_serving("", True)

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server(interceptors=[EdgeInterceptor()], options=server_options(PUBLIC_MESSAGE_BYTES))
        self._server.add_generic_rpc_handlers((Unreadable(self.num_unreadable),))
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        port = self._server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        await self.set_ready(True)
        await self._server.start()

    async def stop(self) -> None:
        """Kills it: every session breaks, every request stays."""
        if self._server is not None:
            self.break_sessions()
            await self._server.stop(0)
            self._server = None

    async def set_ready(self, ready: bool) -> None:
        self._health.set_serving("quire.v1.Inference", ready)

    async def set_degraded(self, degraded: bool) -> None:
        """Health of the journal."""
        self._health.set_serving("quire.v1.Journal", not degraded)

    def break_sessions(self) -> None:
        for session in self._sessions:
            session.is_broken = True
            session.news.set()

    def release(self, request_id: str, num_tokens: int = ALL, index: int | None = None) -> None:
        """Lets tokens of one sample of a request or of each out, up to `num_tokens` in all."""
        self.runs[request_id].release(num_tokens, index)
        self._announce()

    def skip(self, request_id: str, num_tokens: int, index: int = 0) -> None:
        """Goes wrong: leaves out tokens of a sample for every reader of a request; with a negative number, repeats."""
        for session in self._sessions:
            for place in session.places.values():
                if place.run is self.runs[request_id]:
                    place.positions[index] += num_tokens
        self.release(request_id)

    def end(self, request_id: str, state: pb.RequestState.ValueType) -> pb.RequestState.ValueType:
        run = self.runs.get(request_id)
        if run is None:
            raise NotFoundError(f"no request has the id {request_id!r}")
        if not run.has_ended:
            run.state = state
        self._announce()
        return run.state

    def change(self, request_id: str, state: pb.RequestState.ValueType) -> pb.RequestState.ValueType:
        """Pauses a request, or lets it go on."""
        run = self.find(request_id)
        if run.has_ended:
            raise FailedPreconditionError(f"request {request_id!r} has ended")
        run.state = state
        self._announce()
        return state

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until what the client said makes the condition true."""
        async with asyncio.timeout(patient(10)), self._changed:
            await self._changed.wait_for(condition)

    async def note(self, action: str, request_id: str) -> None:
        self.received.append((action, request_id))
        async with self._changed:
            self._changed.notify_all()

    def count(self, action: str, request_id: str) -> int:
        return self.received.count((action, request_id))

    def submit(self, request: pb.GenerateRequest) -> tuple[Run, bool]:
        known = self.runs.get(request.request_id)
        script = self.scripts.get(request.text, self.default)
        if script.refusals:
            raise script.refusals.pop(0)
        if known is not None:
            if known.request != request:
                raise AlreadyExistsError("the id belongs to another request")
            return known, True
        run = Run(request, script)
        self.runs[request.request_id] = run
        return run, False

    def find(self, request_id: str) -> Run:
        run = self.runs.get(request_id)
        if run is None:
            raise NotFoundError(f"no request has the id {request_id!r}")
        if run.script.refusals:
            raise run.script.refusals.pop(0)
        return run

    def _announce(self) -> None:
        for session in self._sessions:
            session.news.set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        run, attached = self.submit(request)
        yield pb.GenerateResponse(accepted=run.accepted(attached))
        for index in range(len(run.released)):
            yield pb.GenerateResponse(chunk=run.chunk(index, 0))
        yield pb.GenerateResponse(finished=run.finished())

    async def Attach(self, request: pb.AttachRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        run = self.find(request.request_id)
        yield pb.GenerateResponse(accepted=run.accepted(True))
        positions = [*request.from_positions, *[0] * len(run.released)]
        for index in range(len(run.released)):
            yield pb.GenerateResponse(chunk=run.chunk(index, positions[index]))
        yield pb.GenerateResponse(finished=run.finished())

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        session = ScriptedSession(self)
        self._sessions.add(session)
        self.num_sessions += 1
        reading = asyncio.create_task(session.read(request_iterator))
        try:
            while not (session.is_closed and not session.places):
                response = session.next_response()
                if session.is_broken:
                    raise UnavailableError("the script breaks the session")
                if response is None:
                    await session.news.wait()
                    session.news.clear()
                else:
                    yield response
        finally:
            reading.cancel()
            self._sessions.discard(session)
            await self.note("end-of-session", "")

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        await self.note("Cancel", request.request_id)
        return pb.CancelResponse(state=self.end(request.request_id, pb.REQUEST_STATE_CANCELLED))

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        await self.note(f"Pause {pb.PauseKeep.Name(request.keep)}", request.request_id)
        return pb.PauseResponse(state=self.change(request.request_id, pb.REQUEST_STATE_PAUSED))

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        await self.note("Resume", request.request_id)
        return pb.ResumeResponse(state=self.change(request.request_id, pb.REQUEST_STATE_RUNNING))

    async def GetRequest(self, request: pb.GetRequestRequest, context: Any) -> pb.GetRequestResponse:
        return self.find(request.request_id).record()

    async def DeleteRecord(self, request: pb.DeleteRecordRequest, context: Any) -> pb.DeleteRecordResponse:
        if not self.find(request.request_id).has_ended:
            raise FailedPreconditionError("it has not ended: cancel it first")
        del self.runs[request.request_id]
        return pb.DeleteRecordResponse()

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        """List requests that have not ended; a page token is the number already listed."""
        self.listings.append(request)
        live = [
            run.summary()
            for run in self.runs.values()
            if not run.has_ended and (not request.HasField("tenant") or run.request.tenant == request.tenant)
        ]
        wanted = [each for each in live if not request.states or each.state in request.states]
        first = int(request.page_token or 0)
        end = first + (request.page_size or 100)
        return pb.ListRequestsResponse(
            requests=wanted[first:end], next_page_token=str(end) if end < len(wanted) else ""
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        words = (request.text or " ".join(each.content for each in request.chat.messages)).split()
        return pb.TokenizeResponse(token_ids=range(len(words)), tokens=words)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        pieces = [f" {i}" for i in request.token_ids]
        text = "".join(pieces)
        return pb.DetokenizeResponse(text=text, pieces=[each.encode() for each in pieces] if request.pieces else ())

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Any) -> pb.PinPrefixResponse:
        await self.note("PinPrefix", request.name)
        if self.refuse_calls:
            raise self.refuse_calls.pop(0)
        return self.prefixes.pin(request)

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Any) -> pb.UnpinPrefixResponse:
        return self.prefixes.unpin(request)

    async def ListPrefixes(self, request: pb.ListPrefixesRequest, context: Any) -> pb.ListPrefixesResponse:
        return self.prefixes.list(request)

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        if self.refuse_calls:
            raise self.refuse_calls.pop(0)
        return pb.GetModelResponse(
            name="scripted", max_model_len=2048, vocab_size=100, eos_token_ids=[2], has_tokenizer=True
        )

    async def Topology(
        self, request: cluster_pb2.TopologyRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.TopologyResponse]:
        await self.may_tell_shards.wait()
        yield cluster_pb2.TopologyResponse(shards=[cluster_pb2.Shard()])
        await self.may_end_shards.wait()

    async def SetShards(self, request: cluster_pb2.SetShardsRequest, context: Any) -> cluster_pb2.SetShardsResponse:
        if request.num_shards > 999:
            raise InvalidRequestError.of([FieldViolation("num_shards", "give 1 to 999")])
        self.num_shards_wanted = request.num_shards
        return cluster_pb2.SetShardsResponse(version=2, num_shards=1, wanted_shards=request.num_shards)

    async def Register(self, request: cluster_pb2.RegisterRequest, context: Any) -> cluster_pb2.RegisterResponse:
        raise FailedPreconditionError("its one worker is a script")

    async def DrainWorker(
        self, request: cluster_pb2.DrainWorkerRequest, context: Any
    ) -> cluster_pb2.DrainWorkerResponse:
        if request.worker_id != "w0":
            raise NotFoundError(f"no worker {request.worker_id!r} is connected")
        self.is_draining = not request.undo
        return cluster_pb2.DrainWorkerResponse(num_running=2)

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        self.num_looks += 1
        await self.note("GetStats", "")
        await self.may_answer.wait()
        blocks = pb.BlockStats(
            total=100, used=30, cached=20, free=50, block_size=16,
            filled_slots=456, fragmented_slots=16, reserved_slots=8,
            prefix_query_tokens=200, prefix_hit_tokens=50,
            pinned=2, shared=4, sequence_blocks=28, saved=12,
        )  # fmt: skip
        worker = pb.WorkerStats(
            worker_id="w0", address="127.0.0.1:1", num_running=2, blocks=blocks, num_steps=9, draining=self.is_draining,
            step_ns=8_000_000, overhead_ns=200_000,
            num_preemptions=5, num_swaps=3, recomputed_tokens=70, copied_blocks=9,
            host_blocks=64, used_host_blocks=6, swapped_out_blocks=18, swapped_in_blocks=12,
            prefill_tokens_per_s=4000.0,
        )  # fmt: skip
        journal = pb.JournalStats(store="memory", entries=4, write_ns=70_000)
        return pb.GetStatsResponse(
            workers=[worker],
            num_running=2,
            num_waiting=1,
            num_paused=3,
            output_tokens=1000,
            uptime_ms=5000,
            epoch=self.epoch,
            journal=journal,
            latency=pb.LatencyStats(
                num_requests=7,
                first_token_p50_ns=12_000_000,
                first_token_p99_ns=345_000_000,
                token_p50_ns=19_100_000,
                token_p99_ns=25_200_000,
            ),
        )


@dataclass(slots=True, eq=False)
class Place:
    """Position of one reader in one request."""

    run: Run
    positions: list[int]  # next, by sample
    is_told: set[int] = field(default_factory=set)  # of the end of these samples

    def chunks(self) -> Iterator[pb.Chunk]:
        """Chunks that are new to the reader."""
        for index, position in enumerate(self.positions):
            run = self.run
            if index in self.is_told or (position >= run.released[index] and not run.sample_has_ended(index)):
                continue
            chunk = run.chunk(index, position)
            self.positions[index] += chunk.num_tokens
            if chunk.HasField("finish"):
                self.is_told.add(index)
            yield chunk

    @property
    def is_at_the_end(self) -> bool:
        return self.run.has_ended and len(self.is_told) == len(self.positions)


class ScriptedSession:
    """One open session: places in outputs by handle."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.places: dict[int, Place] = {}
        self.news = asyncio.Event()
        self.is_broken = False
        self.is_closed = False
        self._events: list[pb.SessionEvent] = []

    async def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        async for message in requests:
            action = str(message.WhichOneof("action"))
            request_id = self._take(message, action)
            self.news.set()
            await self.server.note(action, request_id)
        self.is_closed = True
        self.news.set()

    def next_response(self) -> pb.SessionResponse | None:
        events, self._events = self._events, []
        for handle, place in list(self.places.items()):
            if place.run.script.silent:
                continue
            events += [pb.SessionEvent(handle=handle, chunk=chunk) for chunk in place.chunks()]
            if place.is_at_the_end:
                events.append(pb.SessionEvent(handle=handle, finished=place.run.finished()))
                del self.places[handle]
        return pb.SessionResponse(events=events) if events else None

    def _take(self, message: pb.SessionRequest, action: str) -> str:
        handle = message.handle
        if action in ("submit", "attach"):
            request_id = message.submit.request_id or message.attach.request_id
            try:
                self._open(message, action)
            except QuireError as error:
                status = to_status(error)
                detail = pb.Error(code=status.code, message=status.message, status=status.SerializeToString())
                self._events.append(pb.SessionEvent(handle=handle, error=detail))
            return request_id
        place = self.places.get(handle)
        if place is None:
            return ""
        request_id = place.run.request.request_id
        if action == "cancel":
            self.server.end(request_id, pb.REQUEST_STATE_CANCELLED)
        else:
            del self.places[handle]
        return request_id

    def _open(self, message: pb.SessionRequest, action: str) -> None:
        if action == "submit":
            (run, attached), wanted = self.server.submit(message.submit), []
        else:
            run, attached = self.server.find(message.attach.request_id), True
            wanted = list(message.attach.from_positions)
        self.server.attached_at.append(wanted)
        positions = wanted + [0] * (len(run.released) - len(wanted))
        if len(positions) > len(run.released) or any(map(operator.gt, positions, run.released)):
            raise InvalidRequestError(f"from_positions: {wanted} is beyond what was sent, {run.released}")
        self.places[message.handle] = Place(run, positions)
        if not run.script.silent:
            self._events.append(pb.SessionEvent(handle=message.handle, accepted=run.accepted(attached)))
