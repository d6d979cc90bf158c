"""Stage of scenarios: deployments that are kept or made, loads, and the verdict on the clients' histories."""

import asyncio
import itertools
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import quire
from tests.chaos.asks import ChaosAsk, chaos_asks
from tests.chaos.chaos_store import ChaosStore
from tests.chaos.checking import DemoMargins, Reference, differing_records
from tests.chaos.client_load import END_TIMEOUT_S, ClientLoad
from tests.chaos.deployment import Deployment, Life, Place
from tests.chaos.proxy import Proxy
from tests.chaos.scenario import NOTHING_CRASHES, NOTHING_LOST, Figures, Target

STANDARD_WORKERS = ("worker-0", "worker-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Size of the load."""

    num_asks: int = 28
    min_tokens: int = 60
    max_tokens: int = 140
    concurrency: int = 12
    num_clients: int = 2
    flow_tokens: int = 300  # that must have come before a fault, unless the scenario says otherwise
    campaign_s: float = 120.0


class Stage:
    """One run of scenarios, all with the same asks."""

    def __init__(self, seed: int, extent: Extent) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.extent = extent
        self.asks = chaos_asks(seed, extent.num_asks, extent.min_tokens, extent.max_tokens)
        self._standard: Deployment | None = None
        self._reference: Reference | None = None
        self._load_numbers = itertools.count()
        self._scene = ExitStack()
        self._scene_deployments: list[Deployment] = []
        self._proxies = AsyncExitStack()

    async def standard(self) -> Deployment:
        """Deployment that scenarios share: one scheduler and two workers, all ready and idle."""
        if self._standard is None:
            self._standard = Deployment()
            await self._standard.begin(*STANDARD_WORKERS)
            await self._make_reference(self._standard)
        deployment = self._standard
        deployment.store.revive()
        if deployment.scheduler.is_over:
            await deployment.begin_scheduler()
        for name in STANDARD_WORKERS:
            if deployment.workers[name].is_over:
                deployment.begin_worker(name)
        await deployment.until_driven(*STANDARD_WORKERS)
        return deployment

    async def flowing(self) -> tuple[Deployment, ClientLoad]:
        """The standard deployment, and a load whose output flows."""
        deployment = await self.standard()
        load = self.load(deployment.address)
        await load.until_flowing()
        return deployment, load

    def own(
        self,
        *,
        scheduler_flags: Sequence[str] = (),
        num_blocks: int = 1024,
        num_host_blocks: int = 256,
        store: ChaosStore | None = None,
    ) -> Deployment:
        """A deployment with nothing started but its store, for this scenario alone."""
        deployment = Deployment(
            scheduler_flags=scheduler_flags, num_blocks=num_blocks, num_host_blocks=num_host_blocks, store=store
        )
        self._scene.callback(deployment.close)
        self._scene_deployments.append(deployment)
        return deployment

    def cleanup(self, action: Callable[[], object]) -> None:
        """Register work for the end of the scenario."""
        self._scene.callback(action)

    async def proxy(self, server: str) -> Proxy:
        """Start a proxy of a server, until the scenario ends."""
        return await self._proxies.enter_async_context(Proxy(server, seed=self.seed))

    async def store_path(self, deployment: Deployment) -> Proxy:
        """A proxy before the store, for the schedulers of the deployment that begin from now on."""
        path = await self.proxy(str(deployment.store.socket_path))
        deployment.store_url = f"redis://{path.address}"
        return path

    def folder(self) -> Path:
        """Make an empty folder, removed after the scenario."""
        return Path(self._scene.enter_context(tempfile.TemporaryDirectory(prefix="quire-chaos-")))

    def load(
        self,
        address: str,
        *,
        concurrency: int | None = None,
        reconnect_timeout_s: float = 60.0,
        on_disconnect: quire.OnDisconnect = quire.OnDisconnect.CONTINUE,
        asks: Sequence[ChaosAsk] | None = None,
    ) -> ClientLoad:
        """Clients that ask until they are told to end.

        Their requests go on without them unless it is said otherwise: on a busy machine a client may be slower to come
        back than the grace that it would have.
        """
        load = ClientLoad(
            address,
            self.asks if asks is None else asks,
            self.folder(),
            f"load{next(self._load_numbers)}",
            concurrency=concurrency or self.extent.concurrency,
            num_processes=self.extent.num_clients,
            flow_tokens=self.extent.flow_tokens,
            reconnect_timeout_s=reconnect_timeout_s,
            on_disconnect=on_disconnect,
        )
        self._scene.callback(load.close)
        return load

    async def reference(self) -> Reference:
        """The undisturbed run, made once."""
        if self._reference is None:
            await self.standard()
        assert self._reference is not None
        return self._reference

    async def figures(
        self,
        load: ClientLoad,
        deployment: Place,
        *,
        struck_s: float | None = None,
        detected_s: float | None = None,
        recovered_s: float | None = None,
        records_since_s: float = 0.0,
        end_timeout_s: float = END_TIMEOUT_S,
        **more: float,
    ) -> Figures:
        """Lets the load end, and holds what it was told against the undisturbed run and the server's own records.

        Args:
            load: whose clients are to come to their end.
            deployment: that they asked.
            struck_s: when the fault began.
            detected_s: when it was noticed.
            recovered_s: when all was well again.
            records_since_s: only requests that ended after this must have a record.
            end_timeout_s: how long the clients may take to come to their end.
            more: figures of this scenario alone.
        """
        reference = await self.reference()
        history = await load.finish(end_timeout_s)
        verdict = await asyncio.to_thread(reference.judge, list(history.requests.values()))
        async with deployment.client() as client:
            ended = [told for told in history.requests.values() if (told.ended_s or 0.0) > records_since_s]
            verdict.changed += await differing_records(client, ended, verdict.reasons)
        return Figures(
            sent=verdict.sent,
            accepted=verdict.accepted,
            lost=verdict.lost,
            duplicated=verdict.duplicated,
            missing=verdict.missing,
            changed=verdict.changed,
            cuts=verdict.num_cuts,
            detect_s=_since(struck_s, detected_s),
            recover_s=_since(struck_s, recovered_s),
            worst_stall_s=verdict.worst_stall_s,
            leaked_blocks=await deployment.leaked_blocks(),
            more=dict(more),
            reasons=verdict.reasons,
        )

    def note_ends(self, figures: Figures) -> None:
        """Note what services of the scenario ended by a fault of their own, and what tracebacks they logged.

        Whoever starts ended services again asks nobody why they ended.
        """
        deployments = [*self._scene_deployments, *([self._standard] if self._standard is not None else [])]
        count_ends(figures, [life for deployment in deployments for life in deployment.lives])

    async def end_scene(self, *, failed: bool) -> None:
        """Remove what the scenario made; after a failure, also what it shared."""
        self._scene_deployments.clear()
        await asyncio.to_thread(self._scene.close)
        await self._proxies.aclose()
        if failed and self._standard is not None:
            self._standard.close()
            self._standard = None

    async def close(self) -> None:
        """Remove everything."""
        await self.end_scene(failed=True)

    async def judge_by(self, deployment: Deployment) -> None:
        """Compare this scenario's histories with an undisturbed run of this deployment."""
        before, self._reference = self._reference, None
        self._scene.callback(self._restore_reference, before)
        await self._make_reference(deployment)

    def _restore_reference(self, reference: Reference | None) -> None:
        self._reference = reference

    async def _make_reference(self, deployment: Deployment) -> None:
        if self._reference is not None:
            return
        async with deployment.client() as client:
            runs = (client.generate(list(ask.prompt), **ask.params()) for ask in self.asks)
            completions = await asyncio.gather(*runs)
        self._reference = Reference(self.asks, list(completions), DemoMargins())


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A fault of the matrix."""

    fault: str  # by its id there
    title: str
    injected: str  # how
    promise: str  # which of P1 to P8
    play: Callable[[Stage], Awaitable[Figures]]
    targets: tuple[Target, ...] = NOTHING_LOST
    is_logged: bool = False  # with a traceback, by the services that it strikes

    @property
    def all_targets(self) -> tuple[Target, ...]:
        """Targets of its own, and those of every scenario."""
        everywhere = [each for each in NOTHING_CRASHES if not (self.is_logged and each.figure == "tracebacks")]
        return (*self.targets, *everywhere)


def count_ends(figures: Figures, lives: Sequence[Life]) -> None:
    """Count crashes and tracebacks among lives of services, with a reason for each that has any."""
    crashed = [life for life in lives if life.has_crashed]
    figures.died_by_themselves = len(crashed)
    figures.tracebacks = sum(life.num_tracebacks for life in lives)
    figures.reasons += [f"{life.name} ended by itself: {''.join(life.service.raw[-1:])}" for life in crashed]
    figures.reasons += [f"{life.name}: {life.first_traceback}" for life in lives if life.num_tracebacks]


def _since(struck_s: float | None, at_s: float | None) -> float | None:
    return None if struck_s is None or at_s is None else max(0.0, at_s - struck_s)
