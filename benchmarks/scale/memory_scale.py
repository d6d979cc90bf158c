"""Resident memory of the scheduler by requests that wait, each with its reader; and how long admissions took at most.

One worker with a single seat, so that all but one request wait.
"""

import asyncio
import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.services.processes import Process, embedded_valkey, started
from benchmarks.services.steady_load import RETRIES
from benchmarks.services.traced_services import TOKENIZER, VOCAB_SIZE
from quire import AsyncClient, OnDisconnect
from quire.stream import CompletionStream

PROMPT_TOKENS = 128
MAX_TOKENS = 256
AT_ONCE = 256  # submissions on their way
_NO_LIMIT = 10**9
_NO_WAIT_LIMIT = 10**15  # one seat, and 256 steps of a second: 100,000 requests would take most of a year


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedMemory:
    """Memory with this many requests waiting."""

    queued: int
    resident_mb: float
    beyond_empty_mb: float  # what it had without any
    kb_per_request: float
    slowest_admission_ms: float  # of those that came last


def measure_memory(counts: Sequence[int]) -> list[QueuedMemory]:
    """Measure with one start of all processes; the queue grows from count to count."""
    flags = ["--listen", "127.0.0.1:0", "--max-num-seqs", "1", "--max-queue-requests", str(_NO_LIMIT)]
    flags += [
        "--max-queue-tokens",
        str(_NO_LIMIT),
        "--max-queue-wait-ms",
        str(_NO_WAIT_LIMIT),
        "--drain-timeout-s",
        "0",
    ]
    with embedded_valkey(None) as store, started("scheduler_svc", "--store", store, *flags) as scheduler:
        address = str(scheduler.wait_for("listening")["address"])
        flags = ["--scheduler", address, "--max-num-seqs", "1", "--step-ms", "1000", "--tokenizer", str(TOKENIZER)]
        with started("benchmarks.services.simulated_worker", *flags, "--vocab-size", str(VOCAB_SIZE)):
            scheduler.wait_for("worker ready")
            return uvloop.run(_grow(address, scheduler, counts))


async def _grow(address: str, scheduler: Process, counts: Sequence[int]) -> list[QueuedMemory]:
    gc.disable()  # of this process, whose pauses are nobody's concern here
    rows = []
    async with AsyncClient(address, retries=RETRIES) as client:
        await client.wait_ready(10.0)
        queue = _Queue(client)
        await queue.grow_to(1)
        empty_kb = _resident_kb(scheduler.pid)
        for count in counts:
            slowest_s = await queue.grow_to(1 + count)
            resident_kb = _resident_kb(scheduler.pid)
            rows.append(
                QueuedMemory(
                    queued=count,
                    resident_mb=round(resident_kb / 1024, 1),
                    beyond_empty_mb=round((resident_kb - empty_kb) / 1024, 1),
                    kb_per_request=round((resident_kb - empty_kb) / count, 2),
                    slowest_admission_ms=round(slowest_s * 1000, 1),
                )
            )
            print(rows[-1], flush=True)
    return rows


class _Queue:
    """Requests that are accepted and wait. The first one runs."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._streams: list[CompletionStream] = []
        self._random = random.Random(0)
        self._room = asyncio.Semaphore(AT_ONCE)

    async def grow_to(self, count: int) -> float:
        """Grow the queue; return the seconds of the slowest admission."""
        return max(await asyncio.gather(*(self._submit() for _ in range(count - len(self._streams)))))

    async def _submit(self) -> float:
        async with self._room:
            prompt = [self._random.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
            began_s = time.monotonic()
            stream = self._client.stream(
                prompt, max_tokens=MAX_TOKENS, ignore_eos=True, on_disconnect=OnDisconnect.CONTINUE
            )
            await stream.accepted()
            self._streams.append(stream)
            return time.monotonic() - began_s


def _resident_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
