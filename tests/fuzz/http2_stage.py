"""Abuse of HTTP/2: resets, unfinished bodies, compressed bombs, idle calls and floods, beside a client that behaves.

    python -m tests.fuzz.http2_stage ADDRESS NUMBER SEED

is the attacker, a process of its own, so that the client that behaves is slowed down by the server alone.
"""

import asyncio
import contextlib
import random
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

import quire
from tests.fuzz.outcome import Outcome, Stage
from tests.hostile.attacks import (
    GENERATE,
    GET_REQUEST,
    SESSION,
    compressed_bomb,
    connection_flood,
    idle_calls,
    rapid_reset,
    unfinished_bodies,
)
from tests.hostile.besieged import MIB, Besieged, besieged_scheduler
from tests.hostile.raw_connection import ConnectionCutError
from tests.services import ROOT

METHODS = (GENERATE, SESSION, GET_REQUEST)
HALF_OPEN_S = 2.0
CALM_ANSWERS = 200
NUM_CALM_CLIENTS, NUM_CALM_CALLS = 50, 40  # of each, all at once
MOST_SLOWDOWN = 3.0
MOST_GROWTH = 1.1  # of resident memory, a minute later
NOTHING_MS = 20.0  # of p99: below it a ratio says nothing


def attacks(address: str, rng: random.Random) -> list[Callable[[], object]]:
    """List all kinds of attack, with sizes that the seed draws."""
    method = rng.choice(METHODS)
    return [
        partial(compressed_bomb, address, method, num_bytes=rng.choice((1, 100, 1000)) * MIB),
        partial(unfinished_bodies, address, method, num_calls=rng.randrange(1, 60), num_bytes=15 * MIB, hold_s=1.0),
        partial(rapid_reset, address, method, num_calls=rng.randrange(100, 5000), body=rng.choice((None, b"", b"x"))),
        partial(_idle, address, method, rng.randrange(10, 400)),
        partial(_flood, address, rng.randrange(100, 1000)),
        partial(_half_open, address, rng.randbytes(rng.randrange(200))),
    ]


def _idle(address: str, method: str, num_calls: int) -> None:
    connection, _ = idle_calls(address, method, num_calls=num_calls)
    with connection:
        time.sleep(HALF_OPEN_S)


def _flood(address: str, num_connections: int) -> None:
    with connection_flood(address, num_connections=num_connections):
        time.sleep(HALF_OPEN_S)


def _half_open(address: str, said: bytes) -> None:
    """A connection that says something that is no HTTP/2, and stays."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5.0) as connection:
        connection.sendall(said)
        time.sleep(HALF_OPEN_S)


async def abuse(num_inputs: int, seed: int) -> Outcome:
    """One attack after another."""
    outcome = Outcome("abuse of HTTP/2", num_inputs)
    async with besieged_scheduler() as site:
        # What it takes to serve that many at once it has before the attack: only what an attacker leaves counts.
        await asyncio.gather(*(_serve_calls(site.address) for _ in range(NUM_CALM_CLIENTS)))
        calm_ms = await _p99_ms(site, CALM_ANSWERS)
        before = site.peak_bytes = site.resident_bytes
        site.neighbour.latencies_s.clear()
        command = [sys.executable, "-m", "tests.fuzz.http2_stage", site.address, str(num_inputs), str(seed)]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
        code = await process.wait()
        struck_ms = site.neighbour.p99_ms()
        if code:
            outcome.fail(f"the attacker ended with {code}")
        for failure in site.neighbour.failures:
            outcome.fail(f"the client that behaves: {failure}")
        if struck_ms > MOST_SLOWDOWN * max(calm_ms, NOTHING_MS):
            outcome.fail(f"p99 of the client that behaves went from {calm_ms:.1f} to {struck_ms:.1f} ms")
        after = await site.until_resident_below(MOST_GROWTH * before)
        if after > MOST_GROWTH * before:
            outcome.fail(f"resident memory went from {before} to {after} bytes")
        outcome.figures = {
            "calm_p99_ms": round(calm_ms, 1),
            "struck_p99_ms": round(struck_ms, 1),
            "resident_before_mib": round(before / MIB, 1),
            "resident_peak_mib": round(site.peak_bytes / MIB, 1),
            "resident_after_mib": round(after / MIB, 1),
        }
    return outcome


async def _serve_calls(address: str) -> None:
    """One of many clients that behave, with calls of its own on its connection."""
    async with quire.AsyncClient(address) as client:
        calls = (client.generate([1, 2, 3], max_tokens=5, ignore_eos=True) for _ in range(NUM_CALM_CALLS))
        await asyncio.gather(*calls)


async def _p99_ms(site: Besieged, number: int) -> float:
    site.neighbour.latencies_s.clear()
    await site.neighbour.until_answered(number)
    return site.neighbour.p99_ms()


def main() -> None:
    """The attacker."""
    address, number, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    for _ in range(number):
        with contextlib.suppress(ConnectionCutError, OSError):  # cut, as it should be
            rng.choice(attacks(address, rng))()


STAGES = (Stage(name="http2", num_inputs=60, play=abuse),)


if __name__ == "__main__":
    main()
