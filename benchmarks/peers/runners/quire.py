"""Runner: our own services, journal included, asked through the SDK by this process."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import uvloop

from benchmarks.model_services import Deployment, serving
from benchmarks.peers.runners.harness import Recorder, Request, Setup, serve
from quire import AsyncClient

_BLOCK_SIZE = 16
_READY_S = 10.0


class Quire:
    """Store, scheduler and worker, each a process."""

    def __init__(self, setup: Setup) -> None:
        self.computes_in = setup.dtype
        flags = ["--num-blocks", str(-(-setup.pool_tokens // _BLOCK_SIZE)), "--threads", str(setup.threads)]
        self._services = ExitStack()
        site = self._services.enter_context(
            serving(
                Deployment(
                    model=Path(setup.model),
                    device="cpu",
                    dtype=setup.dtype,
                    max_num_seqs=setup.max_num_seqs,
                    max_batched_tokens=setup.options.get("max_batched_tokens"),
                    prefix_cache=False,
                    worker_flags=(*flags, *setup.options.get("worker_flags", ())),
                )
            )
        )
        self._loop = self._services.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        self._client = self._loop.run(_connected(site.address))

    def run(self, recorder: Recorder) -> None:
        self._loop.run(self._run(recorder))

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._services.close()

    async def _run(self, recorder: Recorder) -> None:
        await asyncio.gather(*(self._one(recorder, each) for each in recorder.requests))

    async def _one(self, recorder: Recorder, request: Request) -> None:
        await asyncio.sleep(max(0.0, request.arrival_s - recorder.now_s()))
        recorder.sent(request.index)
        stream = self._client.stream(request.prompt, max_tokens=request.num_output, temperature=0, ignore_eos=True)
        async for chunk in stream:
            recorder.came(request.index, chunk.token_ids)


async def _connected(address: str) -> AsyncClient:
    client = AsyncClient(address)
    await client.wait_ready(_READY_S)
    return client


if __name__ == "__main__":
    serve(Quire, ("quire", "torch"))
