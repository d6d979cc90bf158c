"""The scheduler's whole serving path in one process: public gRPC server, engine, journal, and links to workers.

As `scheduler_svc.__main__` puts it together, but on a store of the test's choice and with workers of its making.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from math import inf
from types import MappingProxyType
from typing import Any

import grpc

from common.arrays import pack_int32
from common.peer_limits import EdgeLimits
from common.rpc import QUICK_KEEPALIVE, Keepalive
from common.serving import GrpcServer
from quire.errors import QuireError
from quire.rpc import PUBLIC_MESSAGE_BYTES, channel_options
from quire.v1 import cluster_pb2_grpc, inference_pb2_grpc, journal_pb2
from quire.v1 import inference_pb2 as pb
from scheduler_svc.api.cluster_servicer import ClusterServicer
from scheduler_svc.api.inference_servicer import InferenceServicer
from scheduler_svc.api.stats import StatsReporter
from scheduler_svc.core.preemption import PreemptionMode
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.records import Records
from scheduler_svc.journal.store import RecordLimits, Store, StoreError
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.live.cache_summary import CacheSummary
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.publisher import Delivery
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.prefixes.prefix_keeper import PrefixKeeper
from scheduler_svc.requests.prefixes.prefix_requests import PinLimits, Prefixes
from scheduler_svc.requests.queue_limits import AdmissionLimits
from scheduler_svc.requests.recovery.recovery import Recovery
from scheduler_svc.requests.request_control import RequestControl
from scheduler_svc.requests.request_list import RequestList
from scheduler_svc.requests.shard_rule import SeenPlan, ShardRule
from scheduler_svc.workers.worker_link import WorkerLink
from scheduler_svc.workers.workers import Workers
from tests.patience import patient
from tests.scheduler.journal_setup import until
from tests.scheduler.scripted_worker import ScriptedWorker

_NO_PIN_LIMITS = PinLimits()

# Option of a channel. Its windows grow else to many MB, the further the slower the machine is, and hold what a test
# means to be too much for them.
FIXED_WINDOWS = ("grpc.http2.bdp_probe", 0)


class Site:
    """Site with all parts open to the test."""

    def __init__(
        self,
        store: Store,
        *,
        pipeline_depth: int = 2,
        preempt_every: int | None = None,
        preemption: PreemptionMode = "auto",
        grace_s: float = 30.0,
        max_queue_requests: int = 1000,
        max_queue_tokens: int = 1_000_000,
        max_queue_wait_s: float = inf,
        limits: Mapping[str, float] = MappingProxyType({}),  # others of AdmissionLimits
        record_limits: RecordLimits | None = None,
        pin_limits: PinLimits = _NO_PIN_LIMITS,
        admission_timeout_s: float = 5.0,
        epoch: int = 1,
        prefix_cache: bool = True,
        pin_retry_s: float = 0.01,
        model_patience_s: float = 30.0,  # of what was recovered
        model_kept_s: float = 0.0,  # without workers
        only_model: str | None = None,
        restate_entries: int = 4096,
        trim_every: int = 512,
        probe_every_s: float = 0.5,
        slow_reader_timeout_s: float | None = None,
        keepalive: Keepalive = QUICK_KEEPALIVE,
        late_s: float = 60.0,
        delivery: Delivery = "durable",
        stream_interval_s: float = 0.0,
        make_link: Callable[[str], WorkerLink] = WorkerLink,
        shards: SeenPlan | None = None,  # of which this is shard 0; None: there can be but one
    ) -> None:
        self.store = store
        self.journal = Journal(
            store,
            leader_id="test",
            restate_entries=restate_entries,
            trim_every=trim_every,
            probe_every_s=probe_every_s,
            late_s=late_s,
            close_timeout_s=0.2,
        )
        self.records = Records(store, limits=record_limits, close_timeout_s=0.2)
        config = SchedulerConfig(
            preempt_every=preempt_every,
            preemption=preemption,
            pipeline_depth=pipeline_depth,
            enable_prefix_cache=prefix_cache,
        )
        self.engine = Engine(
            Scheduler(config), self.journal, self.records, delivery=delivery, stream_interval_s=stream_interval_s
        )
        self.readers = Readers(self.engine, grace_s=grace_s)
        admission_limits = AdmissionLimits(
            max_queue_requests=max_queue_requests,
            max_queue_tokens=max_queue_tokens,
            max_queue_wait_s=max_queue_wait_s,
            **limits,  # type: ignore[arg-type]
        )
        self.recovery = Recovery(self.engine, self.readers, model_patience_s=model_patience_s)
        shard_rule = None if shards is None else ShardRule(0, shards, 0.0)
        self.cached = None if shards is None else CacheSummary(0, self.engine.scheduler.workers)
        self.control = RequestControl(
            self.engine, self.recovery, admission_limits, timeout_s=admission_timeout_s, shard_rule=shard_rule
        )
        self.admission = Admission(
            self.engine,
            admission_limits,
            self.readers,
            self.recovery,
            self.control,
            timeout_s=admission_timeout_s,
            cached=self.cached,
            shard_rule=shard_rule,
        )
        self.keeper = PrefixKeeper(self.engine, self.admission.in_flight_admissions_still_fit, retry_s=pin_retry_s)
        self.prefixes = Prefixes(self.admission, self.keeper, pin_limits, is_enabled=prefix_cache)
        self.changes: list[bool] = []
        self.fatal: list[QuireError] = []
        self.workers = Workers(
            self.engine,
            self.admission,
            self.keeper,
            epoch=epoch,
            send_whole=False,
            on_change=self.changes.append,
            on_fatal=self.fatal.append,
            make_link=make_link,
            only_model=only_model,
            model_patience_s=model_kept_s,
        )
        self.server = GrpcServer(
            ("quire.v1.Inference", "quire.v1.Cluster"),
            PUBLIC_MESSAGE_BYTES,
            slow_reader_timeout_s=slow_reader_timeout_s,
            keepalive=keepalive,
            limits=EdgeLimits(),
        )
        self.stats = StatsReporter(self.engine, self.admission, self.workers, store_kind=store.kind, delivery=delivery)
        requests = RequestList(self.engine, self.admission)
        inference = InferenceServicer(self.admission, self.control, self.prefixes, requests, self.stats, {})
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, self.server.grpc)
        cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterServicer(self.workers), self.server.grpc)
        self.address = self.server.bind("127.0.0.1:0")
        options = [*channel_options(PUBLIC_MESSAGE_BYTES), FIXED_WINDOWS]
        self._channel = grpc.aio.insecure_channel(self.address, options=options)
        self.inference: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)
        self.cluster: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(self._channel)
        self.writing: list[asyncio.Task[None]] = []
        self._scripted = AsyncExitStack()

    async def start(self) -> None:
        await self.journal.open()
        await self.recovery.read(self.store)
        await self.journal.begin()
        self.keeper.restore(self.recovery.pins)
        self.writing = [asyncio.create_task(self.journal.run()), asyncio.create_task(self.records.run())]
        await self.server.start()

    async def close(self) -> None:
        await self._channel.close()
        await self.recovery.close()
        await self.workers.close()
        await self.server.stop(0)
        await self._scripted.aclose()
        await self.journal.close()
        await self.records.close()
        for task in self.writing:
            with suppress(StoreError):
                await task

    async def add_worker(self, worker_id: str = "w1", **options: Any) -> ScriptedWorker:
        """A scripted worker that is being driven."""
        worker = ScriptedWorker(worker_id, **options)
        await self.start_worker(worker)
        return worker

    async def start_worker(self, worker: ScriptedWorker) -> None:
        """Starts it, registers it and waits until it is driven."""
        await worker.start()
        self.on_close(worker.stop)
        await self.register(worker)

    def on_close(self, end: Callable[[], Awaitable[None]]) -> None:
        """Ends something of the test's together with the site."""
        self._scripted.push_async_callback(end)

    async def register(self, worker: ScriptedWorker) -> None:
        """Announces it until it is driven, as workers do."""
        async with asyncio.timeout(patient(20)):
            while worker.description.worker_id not in [each.worker_id for each in self.workers.driven]:
                await self.cluster.Register(worker.registration())
                await asyncio.sleep(0.005)

    async def until_nobody_is_left(self) -> None:
        """Wait until every worker is forgotten."""
        await until(lambda: not self.workers.members)

    async def idle(self) -> None:
        """Waits until no request is live, and checks that nothing of any request is left behind."""
        await until(lambda: not self.engine.live, 20)
        await until(lambda: self.engine.scheduler.waiting.size() == (0, 0))
        workers = self.engine.scheduler.stats
        await until(lambda: all(each.num_used_blocks == each.num_pinned_blocks for each in workers().workers))
        self.engine.scheduler.check()
        assert not self.engine.sampling_of

    async def run(self, request: pb.GenerateRequest, **call: Any) -> list[pb.GenerateResponse]:
        """Collect all messages of one `Generate`."""
        return [message async for message in self.inference.Generate(request, **call)]


@asynccontextmanager
async def running_site(store: Store | None = None, **options: Any) -> AsyncIterator[Site]:
    site = Site(store or MemoryStore(), **options)
    try:
        await site.start()
        yield site
    finally:
        await site.close()


def counting(start: int, max_tokens: int = 4, request_id: str = "", **fields: Any) -> pb.GenerateRequest:
    """A request whose output is start + 1, start + 2, ..."""
    request = pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=[start]), **fields)
    request.stopping.max_tokens = max_tokens
    request.output.token_ids = True
    return request


def tokens_in(messages: list[pb.GenerateResponse]) -> list[int]:
    """The output, each position once and in order."""
    tokens: list[int] = []
    for message in messages:
        if message.HasField("chunk"):
            assert message.chunk.position == len(tokens)
            tokens.extend(message.chunk.token_ids)
    return tokens


def record_of(request_id: str, num_tokens: int, digest: bytes = b"") -> bytes:
    """A finished request whose output are the numbers from 0 on."""
    finish = pb.SampleFinish(reason=pb.FINISH_REASON_LENGTH)
    response = pb.GetRequestResponse(request_id=request_id, state=pb.REQUEST_STATE_FINISHED)
    response.samples.add(token_ids=range(num_tokens), finish=finish)
    return journal_pb2.RequestRecord(
        response=response,
        request_digest=digest,
        output=pb.OutputParams(token_ids=True),
        max_tokens=num_tokens,
        samples=[journal_pb2.SampleRecord(released_ends=pack_int32([0] * num_tokens))],
        num_samples=1,
    ).SerializeToString()
