"""Steps that break: by chance, by logits that are no numbers, and by a request that breaks every step it is in."""

import asyncio
import time
from contextlib import suppress

import quire
from tests.chaos.deployment import Deployment, Life
from tests.chaos.faulty_worker import EXIT_CODE, POISON
from tests.chaos.scenario import NOTHING_LOST, Figures, Target
from tests.chaos.stage import Scenario, Stage

MODULE = "tests.chaos.faulty_worker"
MAX_DEATHS = 8  # after which the poison is taken away, so that the scenario ends
POISON_TIMEOUT_S = 150.0


async def steps_raise(stage: Stage) -> Figures:
    return await _with_faulty_workers(stage, "raise_now_and_then", num_poisonous=0)


async def a_request_raises(stage: Stage) -> Figures:
    return await _with_faulty_workers(stage, "raise", num_poisonous=1)


async def logits_are_not_finite(stage: Stage) -> Figures:
    return await _with_faulty_workers(stage, "nan", num_poisonous=1)


async def a_request_kills_its_worker(stage: Stage) -> Figures:
    return await _with_faulty_workers(stage, "exit", num_poisonous=1)


async def _with_faulty_workers(stage: Stage, fault: str, *, num_poisonous: int) -> Figures:
    """Run mixed requests on two faulty workers, beside poisonous ones; workers that end are started again."""
    await stage.reference()
    deployment = stage.own()
    for name in ("worker-0", "worker-1"):
        deployment.begin_worker(name, module=MODULE, env={"CHAOS_FAULT": fault})
    await deployment.begin_scheduler()
    await deployment.until_driven("worker-0", "worker-1")
    keeper = Keeper(deployment, fault)
    keeping = asyncio.create_task(keeper.keep())
    try:
        load = stage.load(deployment.address)
        await load.until_flowing()
        async with deployment.client() as client:
            began_s = time.monotonic()
            poisoned = [asyncio.create_task(_poison(client, index, keeper)) for index in range(num_poisonous)]
            num_isolated = sum(await asyncio.gather(*poisoned))
            isolated_s = time.monotonic() - began_s
        await load.until_flowing()
        figures = await stage.figures(load, deployment)
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
    figures.more = {"worker_deaths": keeper.num_deaths}
    if num_poisonous:
        figures.more |= {"poison_not_failed": num_poisonous - num_isolated, "isolated_after_s": isolated_s}
    return figures


class Keeper:
    """Keeper that starts ended workers again."""

    def __init__(self, deployment: Deployment, fault: str) -> None:
        self.num_deaths = 0
        self.too_many = asyncio.Event()
        self._deployment = deployment
        self._fault = fault

    async def keep(self) -> None:
        """Run until cancelled."""
        while True:
            for life in list(self._deployment.workers.values()):
                if life.is_over:
                    self._replace(life)
            await asyncio.sleep(0.05)

    def _replace(self, life: Life) -> None:
        assert life.service.process.returncode == EXIT_CODE, f"{life.name} ended by itself"
        life.is_struck_inside = True
        self.num_deaths += 1
        if self.num_deaths >= MAX_DEATHS:
            self.too_many.set()
        self._deployment.begin_worker(life.name, module=MODULE, env={"CHAOS_FAULT": self._fault})


async def _poison(client: quire.AsyncClient, index: int, keeper: Keeper) -> bool:
    """True if a request with the poisonous token failed, and so was isolated; otherwise it is cancelled."""
    prompt = [*range(10, 40 + index), POISON, 50, 51]
    request = asyncio.create_task(client.generate(prompt, max_tokens=20, temperature=0, request_id=f"poison-{index}"))
    limit = asyncio.create_task(keeper.too_many.wait())
    done, _ = await asyncio.wait({request, limit}, timeout=POISON_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    limit.cancel()
    if request not in done:
        request.cancel()
        with suppress(asyncio.CancelledError, quire.QuireError):
            await request
        return False
    return isinstance(request.exception(), quire.RequestFailedError)


SCENARIOS = (
    Scenario(
        fault="F05",
        title="a step raises now and then",
        injected="every 40th step of both workers raises",
        promise="P1 P2 P6",
        play=steps_raise,
        is_logged=True,
        targets=(*NOTHING_LOST, Target(figure="worker_deaths", at_most=0)),
    ),
    Scenario(
        fault="F05",
        title="a request whose steps raise",
        injected="a runner that raises at one token id",
        promise="P1 P2 P6",
        play=a_request_raises,
        is_logged=True,
        targets=(*NOTHING_LOST, Target(figure="poison_not_failed", at_most=0)),
    ),
    Scenario(
        fault="F05",
        title="a request whose logits are not finite",
        injected="a runner that reports them at one token id",
        promise="P1 P2 P6",
        play=logits_are_not_finite,
        targets=(*NOTHING_LOST, Target(figure="poison_not_failed", at_most=0)),
    ),
    Scenario(
        fault="F06",
        title="a request that ends its worker",
        injected="a runner that exits at one token id; workers are started again",
        promise="P1 P2 P6",
        play=a_request_kills_its_worker,
        targets=(
            *NOTHING_LOST,
            Target(figure="poison_not_failed", at_most=0),
            Target(figure="worker_deaths", at_most=3),
        ),
    ),
)
