"""Ten times as much as a server can serve (F28): what becomes of those let in, and how soon the others are told.

    python -m tests.chaos_input.overload --max-queue-wait-ms 100

starts the demo model and prints the figures; `overload` takes them of any server that has nothing else to do.
"""

import argparse
import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import quire
from quire.cli.load import Lengths, Load, PlannedRequest
from tests.services import Service, start_scheduler, start_worker

_LENGTHS = Lengths.parse("24-40")
_NUM_WARM = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one request."""

    refused: bool
    first_token_s: float  # since it came to the scheduler, which does not count how late we are ourselves
    end_s: float  # since it was due


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadReport:
    """Served requests per second; times in seconds. Times of refusals are those that a client sees."""

    peak_per_s: float
    half_load_ttft_p99_s: float
    overload_ttft_p50_s: float
    overload_ttft_p99_s: float
    overload_per_s: float
    num_admitted: int
    num_refused: int
    refusal_p50_s: float
    refusal_p99_s: float

    @property
    def ttft_ratio(self) -> float:
        """Target: at most 3."""
        return self.overload_ttft_p99_s / self.half_load_ttft_p99_s

    @property
    def goodput(self) -> float:
        """Share of the peak goodput. Target: at least 0.9."""
        return self.overload_per_s / self.peak_per_s


async def overload(address: str, *, duration_s: float = 15.0, factor: float = 10.0) -> OverloadReport:
    """Finds the peak, then offers half of it, then `factor` times it, for `duration_s` each."""
    async with quire.AsyncClient(address, retries=0) as client:
        await client.wait_ready(60)
        model = await client.model()

        async def offer(rate: float, *, seed: int, num_requests: int | None = None) -> "tuple[list[Outcome], float]":
            load = Load(
                rate=rate,
                num_requests=num_requests,
                duration_s=None if num_requests else duration_s,
                output_len=_LENGTHS,
                prompt_len=_LENGTHS,
                prompt=None,
                seed=seed,
            )
            return await _offer(client, load.plan(model.vocab_size, model.eos_token_ids))

        await offer(math.inf, seed=1, num_requests=_NUM_WARM // 4)
        outcomes, took_s = await offer(math.inf, seed=2, num_requests=_NUM_WARM)
        rate = _num_served(outcomes) / took_s
        outcomes, took_s = await offer(1.5 * rate, seed=3)
        peak_per_s = max(rate, _num_served(outcomes) / took_s)
        half, _ = await offer(peak_per_s / 2, seed=4)
        over, took_s = await offer(peak_per_s * factor, seed=5)
    first = [each.first_token_s for each in over if not each.refused]
    refusals = [each.end_s for each in over if each.refused]
    return OverloadReport(
        peak_per_s=peak_per_s,
        half_load_ttft_p99_s=_percentile([each.first_token_s for each in half if not each.refused], 99),
        overload_ttft_p50_s=_percentile(first, 50),
        overload_ttft_p99_s=_percentile(first, 99),
        overload_per_s=_num_served(over) / took_s,
        num_admitted=len(first),
        num_refused=len(refusals),
        refusal_p50_s=_percentile(refusals, 50),
        refusal_p99_s=_percentile(refusals, 99),
    )


async def _offer(client: quire.AsyncClient, planned: list[PlannedRequest]) -> "tuple[list[Outcome], float]":
    """Makes every request when it is due; returns what became of them and how long that took."""
    clock = asyncio.get_running_loop().time
    start_s = clock()
    outcomes = await asyncio.gather(*(_make(client, each, start_s + each.at_s) for each in planned))
    return outcomes, clock() - start_s


async def _make(client: quire.AsyncClient, request: PlannedRequest, due_s: float) -> Outcome:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(max(0.0, due_s - clock()))
    try:
        done = await client.generate(request.prompt, max_tokens=request.max_tokens, seed=request.seed, ignore_eos=True)
    except quire.OverloadedError:
        return Outcome(refused=True, first_token_s=math.inf, end_s=clock() - due_s)
    assert done.timings.first_token_s is not None, "a request ended well without a token"
    return Outcome(refused=False, first_token_s=done.timings.first_token_s, end_s=clock() - due_s)


def _num_served(outcomes: list[Outcome]) -> int:
    return sum(not each.refused for each in outcomes)


def _percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.nan


@asynccontextmanager
async def demo_services(*scheduler_flags: str) -> AsyncIterator[tuple[Service, str]]:
    """The demo model on one worker; the scheduler and its address."""
    service, address = await asyncio.to_thread(start_scheduler, *scheduler_flags)
    with service, start_worker(address, "--threads", "1"):
        await asyncio.to_thread(service.wait_for, "worker ready")
        yield service, address


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="overload", description=__doc__)
    parser.add_argument("--max-queue-wait-ms", default="60000")
    parser.add_argument("--max-num-seqs", default="16")
    parser.add_argument("--duration", type=float, default=15.0)
    arguments = parser.parse_args()
    flags = ("--max-queue-wait-ms", arguments.max_queue_wait_ms, "--max-num-seqs", arguments.max_num_seqs)
    async with demo_services(*flags) as (_, address):
        report = await overload(address, duration_s=arguments.duration)
    figures = {**asdict(report), "ttft_ratio": report.ttft_ratio, "goodput": report.goodput}
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}, indent=2))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_main())
