"""Random constraints on real services: each output meets its own, and a third again under preemption and deaths.

    python -m tests.structured [--requests 10000] [--seed 1] [--record]

The model is the demonstration's. In the second part every request is preempted again and again, and workers and the
scheduler are killed in turn, one each few seconds; the outputs must be those of the first part. Ends with status 1 if
there is a fault.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quire
from benchmarks.report import RESULTS, write_result
from tests.services import Service, free_address, start_scheduler, start_worker
from tests.structured.random_constraints import Constraint, random_constraint
from tests.valkey import ValkeyProcess

NUM_AT_ONCE = 64
MAX_TOKENS = 700  # more than any output here needs
KILL_EVERY_S = 4.0
_POOL = ("--num-blocks", "400", "--num-host-blocks", "100", "--threads", "1")
_WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "n": 2},
    {"temperature": 1.2, "top_k": 40, "repetition_penalty": 1.1, "presence_penalty": 0.3},
    {"beam_width": 3},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request."""

    number: int
    constraint: Constraint
    way: dict[str, Any]

    @property
    def params(self) -> Any:
        seed = {} if "beam_width" in self.way else {"seed": self.number}
        return {**self.constraint.params, **self.way, **seed, "max_tokens": MAX_TOKENS}


class Deployment:
    """A scheduler on a store, and two workers. Any of them can be killed and is started again."""

    def __init__(self, stack: ExitStack, *flags: str) -> None:
        self.address = free_address()
        self._stack = stack
        self._flags = flags
        self._store = stack.enter_context(ValkeyProcess())
        self._scheduler = self._start_scheduler()
        self._workers = [self._start_worker(name) for name in ("first", "second")]
        self.num_kills = 0

    def kill_one(self) -> None:
        """Kill the scheduler or a worker, in turn, and start it again."""
        turn = self.num_kills % 3
        if turn == 0:
            self._scheduler.kill()
            self._scheduler = self._start_scheduler()
        else:
            self._workers[turn - 1].kill()
            self._workers[turn - 1] = self._start_worker(("first", "second")[turn - 1])
        self.num_kills += 1

    def _start_scheduler(self) -> Service:
        service, _ = start_scheduler("--store", self._store.url, *self._flags, listen=self.address)
        return self._stack.enter_context(service)

    def _start_worker(self, name: str) -> Service:
        options = ("--worker-id", name, "--dtype", "float32", *_POOL)
        return self._stack.enter_context(start_worker(self.address, *options))


async def run(address: str, asks: Sequence[Ask]) -> list[quire.Completion | quire.QuireError]:
    """Run all requests, NUM_AT_ONCE at a time."""
    places = asyncio.Semaphore(NUM_AT_ONCE)
    async with quire.AsyncClient(address, reconnect_timeout_s=120.0, retries=50) as client:
        await client.wait_ready(120)

        async def one(ask: Ask) -> quire.Completion | quire.QuireError:
            async with places:
                try:
                    return await client.generate(f"Once upon a time {ask.number}", **ask.params)
                except quire.QuireError as error:
                    return error

        return await asyncio.gather(*map(one, asks))


def faults_of(ask: Ask, found: quire.Completion | quire.QuireError) -> list[str]:
    """Faults of an answer, in words."""
    if isinstance(found, quire.QuireError):
        return [f"{ask.number} {ask.params}: {found}"]
    wrong = [
        each
        for each in found.samples
        if each.finish_reason is not quire.FinishReason.STOP or not ask.constraint.holds(each.text)
    ]
    return [f"{ask.number} {ask.params}: {each.finish_reason.value} {each.text!r}" for each in wrong]


async def run_disturbed(deployment: Deployment, asks: Sequence[Ask]) -> list[quire.Completion | quire.QuireError]:
    """Run while something is killed each few seconds."""
    running = asyncio.create_task(run(deployment.address, asks))
    while not running.done():
        await asyncio.wait([running], timeout=KILL_EVERY_S)
        if not running.done():
            await asyncio.to_thread(deployment.kill_one)
    return running.result()


def main() -> None:
    """Reads the command line and runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write the result")
    parser.add_argument("--output", type=Path, default=RESULTS / "structured.json", help="where")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    asks = [
        Ask(number=number, constraint=random_constraint(generator), way=generator.choice(_WAYS))
        for number in range(options.requests)
    ]
    began_s = time.monotonic()
    with ExitStack() as stack:
        calm = asyncio.run(run(Deployment(stack).address, asks))
    faults = [fault for ask, found in zip(asks, calm, strict=True) for fault in faults_of(ask, found)]
    refused = [each for each in calm if isinstance(each, quire.InvalidRequestError)]
    print(f"{len(asks)} requests in {time.monotonic() - began_s:.0f} s, {len(faults)} faults", flush=True)  # noqa: T201
    third = list(range(0, len(asks), 3))
    with ExitStack() as stack:
        deployment = Deployment(stack, "--preempt-every", "1")
        disturbed = asyncio.run(run_disturbed(deployment, [asks[i] for i in third]))
        num_kills = deployment.num_kills
    completed = [each for each in disturbed if isinstance(each, quire.Completion)]
    num_preempted = sum(each.usage.num_preemptions > 0 for each in completed)
    faults += [
        f"{i} {asks[i].params}: {_texts(calm[i])} became {_texts(found)}"
        for i, found in zip(third, disturbed, strict=True)
        if _texts(calm[i]) != _texts(found)
    ]
    figures = {
        "seed": options.seed,
        "num_requests": len(asks),
        "kinds": dict(sorted(Counter(ask.constraint.kind for ask in asks).items())),
        "num_refused": len(refused),
        "num_outputs": sum(len(each.samples) for each in calm if isinstance(each, quire.Completion)),
        "num_again": len(third),
        "num_preempted": num_preempted,
        "num_kills": num_kills,
        "num_faults": len(faults),
    }
    print(figures, *faults[:20], sep="\n", flush=True)  # noqa: T201
    if options.record:
        write_result(options.output, "structured", figures)
    sys.exit(1 if faults else 0)


def _texts(found: quire.Completion | quire.QuireError) -> list[str] | str:
    return [each.text for each in found.samples] if isinstance(found, quire.Completion) else str(found)


if __name__ == "__main__":
    main()
