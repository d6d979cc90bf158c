"""A double of the scheduler's public face: a real gRPC server that implements `Inference` by a script.

Token i of any output is id i, spelled " i". A test says how many tokens there are, how many are out already, what
is refused, and when the session breaks; it can wait for what the client said. Requests outlive their sessions.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from common.errors import AlreadyExistsError, NotFoundError, QuireError, UnavailableError, to_status
from common.rpc import PUBLIC_MESSAGE_BYTES, EdgeInterceptor, server_options
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc

ALL = 1 << 30


@dataclass(slots=True, kw_only=True)
class Script:
    """How a request goes."""

    num_tokens: int = 8
    released: int = ALL  # tokens out at once; the others when the test says so
    tokens_per_chunk: int = ALL
    refusals: list[QuireError] = field(default_factory=list)  # of its submissions and attachments, in order
    state: pb.RequestState.ValueType = pb.REQUEST_STATE_FINISHED
    error: str = ""
    silent: bool = False  # never answered at all


@dataclass(slots=True, eq=False)
class Run:
    """A request as the server holds it."""

    request: pb.GenerateRequest
    script: Script
    released: int
    state: pb.RequestState.ValueType = pb.REQUEST_STATE_RUNNING

    @property
    def has_ended(self) -> bool:
        return self.state != pb.REQUEST_STATE_RUNNING

    def settle(self) -> None:
        """Ends it if all is out."""
        if self.released >= self.script.num_tokens and not self.has_ended:
            self.released = self.script.num_tokens
            self.state = self.script.state

    def accepted(self, attached: bool) -> pb.Accepted:
        return pb.Accepted(
            request_id=self.request.request_id,
            num_prompt_tokens=3,
            max_tokens=self.script.num_tokens,
            seed=self.request.sampling.seed or 7,
            attached=attached,
        )

    def chunk(self, start: int) -> pb.Chunk:
        end = min(self.released, start + self.script.tokens_per_chunk)
        chunk = pb.Chunk(position=start, num_tokens=end - start, text="".join(f" {i}" for i in range(start, end)))
        if self.request.output.token_ids:
            chunk.token_ids.extend(range(start, end))
        if self.has_ended and end == self.released:
            chunk.finish.CopyFrom(self.finish())
        return chunk

    def finish(self) -> pb.SampleFinish:
        if self.state == pb.REQUEST_STATE_CANCELLED:
            return pb.SampleFinish(reason=pb.FINISH_REASON_CANCELLED)
        if self.state == pb.REQUEST_STATE_EXPIRED:
            return pb.SampleFinish(reason=pb.FINISH_REASON_DEADLINE)
        if self.state == pb.REQUEST_STATE_FAILED:
            return pb.SampleFinish(reason=pb.FINISH_REASON_FAILED)
        return pb.SampleFinish(reason=pb.FINISH_REASON_STOP, stop_string="!")

    def finished(self) -> pb.Finished:
        return pb.Finished(
            state=self.state,
            usage=pb.Usage(prompt_tokens=3, completion_tokens=self.released, cached_tokens=1),
            timings=pb.Timings(accepted_ns=10**6, first_token_ns=2 * 10**6, finished_ns=3 * 10**6),
            error=self.script.error,
        )


class ScriptedServer(inference_pb2_grpc.InferenceServicer):
    """The server; `scripts` are by prompt text, `default` is for every other prompt."""

    def __init__(self) -> None:
        self.default = Script()
        self.scripts: dict[str, Script] = {}
        self.runs: dict[str, Run] = {}
        self.received: list[tuple[str, str]] = []  # (action, request_id), over all sessions
        self.num_sessions = 0
        self.num_looks = 0  # at the statistics
        self.refuse_calls: list[QuireError] = []
        self.address = ""
        self._sessions: set[ScriptedSession] = set()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self._health = health_aio.HealthServicer()

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server(interceptors=[EdgeInterceptor()], options=server_options(PUBLIC_MESSAGE_BYTES))
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
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
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("quire.v1.Inference", status)

    def break_sessions(self) -> None:
        for session in self._sessions:
            session.is_broken = True
            session.news.set()

    def release(self, request_id: str, num_tokens: int = ALL) -> None:
        """Lets tokens of a request out, up to `num_tokens` in all."""
        run = self.runs[request_id]
        run.released = min(num_tokens, run.script.num_tokens)
        run.settle()
        self._announce()

    def skip(self, request_id: str, num_tokens: int) -> None:
        """Goes wrong: leaves out tokens for every reader of a request."""
        run = self.runs[request_id]
        for session in self._sessions:
            for handle, (mine, position) in session.places.items():
                if mine is run:
                    session.places[handle] = (run, position + num_tokens)
        self.release(request_id)

    def end(self, request_id: str, state: pb.RequestState.ValueType) -> pb.RequestState.ValueType:
        run = self.runs.get(request_id)
        if run is None:
            raise NotFoundError(f"no request has the id {request_id!r}")
        if not run.has_ended:
            run.state = state
        self._announce()
        return run.state

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until what the client said makes the condition true."""
        async with asyncio.timeout(10), self._changed:
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
        run = Run(request, script, min(script.released, script.num_tokens))
        run.settle()
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
        yield pb.GenerateResponse(chunk=run.chunk(0))
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

    async def GetRequest(self, request: pb.GetRequestRequest, context: Any) -> pb.GetRequestResponse:
        run = self.find(request.request_id)
        chunk = run.chunk(0)
        return pb.GetRequestResponse(
            request_id=request.request_id,
            state=run.state,
            samples=[pb.SampleOutput(text=chunk.text, token_ids=range(run.released), finish=run.finish())],
            usage=run.finished().usage,
            created_unix_ns=10**18,
            seed=7,
            tenant=run.request.tenant,
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        words = (request.text or " ".join(each.content for each in request.chat.messages)).split()
        return pb.TokenizeResponse(token_ids=range(len(words)), tokens=words)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(f" {i}" for i in request.token_ids))

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        if self.refuse_calls:
            raise self.refuse_calls.pop(0)
        return pb.GetModelResponse(
            name="scripted", max_model_len=2048, vocab_size=100, eos_token_ids=[2], has_tokenizer=True
        )

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        self.num_looks += 1
        await self.note("GetStats", "")
        blocks = pb.BlockStats(
            total=100, used=30, cached=20, free=50, block_size=16, filled_slots=456, fragmented_slots=24,
            prefix_query_tokens=200, prefix_hit_tokens=50,
        )  # fmt: skip
        worker = pb.WorkerStats(
            worker_id="w0", address="127.0.0.1:1", num_running=2, blocks=blocks, num_steps=9,
            step_ns=8_000_000, overhead_ns=200_000,
        )  # fmt: skip
        journal = pb.JournalStats(store="memory", entries=4, write_ns=70_000)
        return pb.GetStatsResponse(
            workers=[worker], num_running=2, num_waiting=1, output_tokens=1000, uptime_ms=5000, journal=journal
        )


class ScriptedSession:
    """One open session: places in outputs by handle."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.places: dict[int, tuple[Run, int]] = {}  # run, next position
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
        for handle, (run, position) in list(self.places.items()):
            if run.script.silent or (position >= run.released and not run.has_ended):
                continue
            chunk = run.chunk(position)
            events.append(pb.SessionEvent(handle=handle, chunk=chunk))
            self.places[handle] = (run, position + chunk.num_tokens)
            if chunk.HasField("finish"):
                events.append(pb.SessionEvent(handle=handle, finished=run.finished()))
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
        run, _ = self.places.get(handle, (None, 0))
        if run is None:
            return ""
        if action == "cancel":
            self.server.end(run.request.request_id, pb.REQUEST_STATE_CANCELLED)
        else:
            del self.places[handle]
        return run.request.request_id

    def _open(self, message: pb.SessionRequest, action: str) -> None:
        if action == "submit":
            (run, attached), position = self.server.submit(message.submit), 0
        else:
            run, attached = self.server.find(message.attach.request_id), True
            position = message.attach.from_positions[0]
        self.places[message.handle] = (run, position)
        if not run.script.silent:
            self._events.append(pb.SessionEvent(handle=message.handle, accepted=run.accepted(attached)))
