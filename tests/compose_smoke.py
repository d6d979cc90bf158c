"""compose.yaml for real: `python -m tests.compose_smoke`, or `make compose-smoke`.

Builds the images from wheels alone, starts the services in the wrong order, streams completions from two workers,
adds a third and kills one under load, stops everything by SIGTERM, and leaves nothing behind but cached images.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import textwrap
import time
import urllib.request
from functools import partial
from pathlib import Path

import quire
from tests.compose.engine import ROOT, Engine, SmokeError, find_engine, say
from tests.compose.images import SMALL_WORKERS, variables_of_images
from tests.compose.load import PROMPTS, Reference, run_reference, running_load, spelled, until_stats
from tests.compose.stack import IMAGES, Stack, wait_until

PROJECT = "quire-smoke"
STOP_S = 3.0
HEALTH = ("quire", "health", "127.0.0.1:7847")


def main() -> None:
    """Exit code 0 if all went well, 1 with a message if not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model", help="folder of the model to serve")
    model: Path = parser.parse_args().model.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that teardown runs
    try:
        with tempfile.TemporaryDirectory(prefix="quire-smoke-") as scratch:
            engine = find_engine(Path(scratch))
            say(f"engine: {engine.command[0]}, {engine.ask('version', '--format={{.Client.Version}}')}")
            smoke(engine, model)
    except SmokeError as error:
        sys.exit(f"compose-smoke: {error}")


def smoke(engine: Engine, model: Path) -> None:
    """Run the whole smoke test on one engine."""
    began_s = time.monotonic()
    stack = Stack(engine, PROJECT, {**variables_of_images(engine), **SMALL_WORKERS, "MODEL": str(model)})
    say("building the images")
    stack.build()
    check_images(engine)
    say(f"images built after {time.monotonic() - began_s:.0f} s")
    stack.tear_down()  # of a run that could not
    try:
        start_in_the_wrong_order(stack)
        check_kernels(stack)
        ask_over_http(stack)
        asyncio.run(serve_and_disturb(stack))
        stop(stack)
    except Exception:
        show_logs(stack)
        raise
    finally:
        stack.tear_down()
    say(f"compose-smoke: all well after {time.monotonic() - began_s:.0f} s; nothing left but cached images")


def check_images(engine: Engine) -> None:
    """No root, a health check, torch in the worker's alone, and no compiler in any."""
    for service, image in IMAGES.items():
        config = engine.ask("image", "inspect", "--format={{.Config.User}} {{.Config.Healthcheck}}", image)
        if not config.startswith("10001") or "health" not in config:
            raise SmokeError(f"{image} must not run as root and must have a health check: {config}")
        size_mb = int(engine.ask("image", "inspect", "--format={{.Size}}", image)) / 1e6
        result = engine.run("run", "--rm", "--network=none", "--entrypoint=python", image, "-c", "import torch")
        has_torch = result.returncode == 0
        if has_torch != (service == "worker") or not (has_torch or "No module named 'torch'" in result.stderr):
            raise SmokeError(f"`import torch` in {image} exits with {result.returncode}: {result.stderr}")
        if engine.run("run", "--rm", "--network=none", "--entrypoint=g++", image, "--version").returncode == 0:
            raise SmokeError(f"{image} has a compiler, so that nobody would see native kernels that are not built in")
        say(f"{image}: {size_mb:.0f} MB, {'with' if has_torch else 'without'} torch")


def start_in_the_wrong_order(stack: Stack) -> None:
    """Workers without a scheduler, then a scheduler without Redis: each must wait for what it needs."""
    stack.up("worker", 2)
    workers = stack.containers("worker")
    for worker in workers:
        wait_until(f"{worker.name} asks for a scheduler", partial(stack.has_logged, worker, "not registered"))
    stack.up("scheduler")
    (scheduler,) = stack.containers("scheduler")
    wait_until("the scheduler runs", lambda: stack.exit_code(scheduler) is None)
    if stack.execute(scheduler, *HEALTH) == 0:
        raise SmokeError("the scheduler says that it can serve, and there is no Redis yet")
    stack.up("redis")
    began_s = time.monotonic()
    for container in stack.containers():
        wait_until(f"{container.name} is healthy", partial(stack.is_healthy, container))
    with quire.Client(stack.address) as client:
        client.wait_ready(60.0)
    say(f"started as workers, scheduler, redis; all healthy {time.monotonic() - began_s:.1f} s after the last")


def ask_over_http(stack: Stack) -> None:
    """A gateway starts, is healthy, and gives the scheduler's answer through its published port."""
    stack.up("gateway")
    (gateway,) = stack.containers("gateway")
    wait_until(f"{gateway.name} is healthy", partial(stack.is_healthy, gateway))
    asked = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"http://{stack.http_address}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not by a proxy of the environment
    with directly.open(request, timeout=60) as response:
        text = json.load(response)["choices"][0]["text"]
    with quire.Client(stack.address) as client:
        expected = client.generate(PROMPTS[0], max_tokens=24, temperature=0).text
    if text != expected:
        raise SmokeError(f"over HTTP the answer is {text!r}, not {expected!r}")
    say("the same answer over HTTP")


async def serve_and_disturb(stack: Stack) -> None:
    """Requests through the published port, while a worker comes and another goes."""
    async with quire.AsyncClient(stack.address) as client:
        await until_stats(client, "two workers are known", lambda stats: len(stats.workers) == 2)
        reference = await run_reference(client)
        say(f"an answer: {PROMPTS[0]} {textwrap.shorten(reference.texts[0], 100)}")
        stats = await client.stats()
        if any(worker.num_steps == 0 for worker in stats.workers):
            raise SmokeError(f"one worker did all the work: {spelled(stats.workers)}")
        say(f"found by name: {spelled(stats.workers)}")
        try:
            await add_and_kill(stack, client, reference)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # what went wrong first


async def add_and_kill(stack: Stack, client: quire.AsyncClient, reference: Reference) -> None:
    """A third worker joins and one of the first two dies under load; the outputs are the reference's."""
    async with running_load(client) as load:
        await asyncio.to_thread(stack.up, "worker", 3)
        stats = await until_stats(
            client,
            "three workers work",
            lambda stats: sum(worker.num_running > 0 for worker in stats.workers) == 3,
        )
        say(f"added one: {spelled(stats.workers)}")
        victim = max(stats.workers, key=lambda worker: worker.num_running)
        await asyncio.to_thread(kill, stack, victim)
        await load.wait_rounds(load.num_rounds + 2)  # of the next to finish, some may have been elsewhere
    load.compare(reference)


def kill(stack: Stack, worker: quire.WorkerStats) -> None:
    """Kills a worker's container, and waits until its sequences have gone back to the queue."""
    container = stack.container_of(worker.worker_id)
    (scheduler,) = stack.containers("scheduler")
    stack.kill(container)
    wait_until("the scheduler notices", partial(stack.has_logged, scheduler, "sequences wait again"), 30.0)
    say(f"killed {container.name}, which ran {worker.num_running} sequences")


def check_kernels(stack: Stack) -> None:
    """Workers compute with the native kernels that were built into the image."""
    for worker in stack.containers("worker"):
        if "built for " not in stack.logs(worker):
            raise SmokeError(f"{worker.name} does not compute with the kernels of its image:\n{stack.logs(worker)}")


def stop(stack: Stack) -> None:
    """SIGTERM ends every container that was not killed, with exit code 0 and soon, though those before it are gone."""
    codes, times = {}, {}
    for service in ("gateway", "scheduler", "worker", "redis"):
        for container in stack.containers(service):
            if stack.exit_code(container) is None:
                began_s = time.monotonic()
                stack.stop(container)
                times[container.name] = time.monotonic() - began_s
                codes[container.name] = stack.exit_code(container)
    if any(code != 0 for code in codes.values()):
        raise SmokeError(f"exit codes after SIGTERM must be 0: {codes}")
    said = ", ".join(f"{name} {time_s:.1f} s" for name, time_s in times.items())
    if max(times.values()) > STOP_S:
        raise SmokeError(f"a container must end within {STOP_S:g} s of SIGTERM when nothing runs: {said}")
    say(f"stopped by SIGTERM, each with exit code 0: {said}")


def show_logs(stack: Stack) -> None:
    """Print the last log lines of the services, to show the cause."""
    for container in stack.containers():
        lines = stack.logs(container).splitlines()[-15:]
        say(f"--- {container.name}, exit code {stack.exit_code(container)}\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
