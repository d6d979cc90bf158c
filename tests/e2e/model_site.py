"""A model on real services and in `transformers`.

Its workers look at one address, where schedulers come and go: a worker finds each by itself and serves many cases.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import quire
from tests.patience import patient
from tests.services import Service, free_address, start_scheduler, start_worker

_ALL_FREE_S = 10.0


class ModelSite:
    """`reference` is the same checkpoint in `transformers`, in float32 as the workers compute it."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.address = free_address()
        self.reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.folder = folder

    @property
    def eos_token_id(self) -> int:
        """The model's own."""
        return int(self.reference.config.eos_token_id)

    def start_worker(self, name: str, *arguments: str) -> Service:
        options = ("--worker-id", name, "--dtype", "float32", "--threads", "1")
        return start_worker(self.address, *options, *arguments, model=self.folder)

    @asynccontextmanager
    async def scheduler(self, *flags: str, num_workers: int = 1) -> AsyncIterator[Service]:
        """One that has its workers; afterwards it must end in order."""
        service, _ = await asyncio.to_thread(start_scheduler, *flags, listen=self.address)
        with service:
            await asyncio.to_thread(service.wait_for, "worker ready", num_workers)
            yield service
            assert await asyncio.to_thread(service.stop) == 0
        assert "Traceback" not in "".join(service.raw)

    @asynccontextmanager
    async def client(self, *flags: str, num_workers: int = 1) -> AsyncIterator[quire.AsyncClient]:
        """Open a client of such a scheduler; when it is done, no block may still be held."""
        async with self.scheduler(*flags, num_workers=num_workers), quire.AsyncClient(self.address) as client:
            await client.wait_ready(60)
            yield client
            await all_free(client)


async def all_free(client: quire.AsyncClient) -> quire.Stats:
    """Returns once no request holds a block, on a device or a host: the last step in flight may hold some a moment."""
    async with asyncio.timeout(patient(_ALL_FREE_S)):
        while True:
            stats = await client.stats()
            if not any(worker.blocks.used or worker.used_host_blocks for worker in stats.workers):
                assert stats.num_running == stats.num_waiting == 0
                return stats
            await asyncio.sleep(0.02)
