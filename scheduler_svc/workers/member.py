"""Worker as its scheduler knows it, from its registration until it is gone. Knows nothing of other workers."""

import asyncio
from dataclasses import dataclass

from scheduler_svc.workers.worker_link import WorkerLink
from scheduler_svc.workers.worker_loop import WorkerLoop


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Reason for which a worker that did not hang up is taken for lost."""

    reason: str
    is_hung: bool = False  # in a step, whose requests may be to blame even if its process lives on


@dataclass(slots=True, kw_only=True)
class Member:
    """One registered worker."""

    worker_id: str
    address: str
    incarnation: str
    link: WorkerLink
    step_key: str = ""
    task: "asyncio.Task[None] | None" = None  # none while it is out of service
    loop: WorkerLoop | None = None  # while it is being driven
    block_size: int = 0
    kv_dtype: str = ""
    max_model_len: int = 0
    seen_s: float
    is_leaving: bool = False  # it was told to end: its hanging up is no loss
    is_drained: bool = False  # by an administrator
    given_up: GivenUp | None = None
    out_of_service: str = ""  # why it gets no work; empty: it does

    @property
    def is_driven(self) -> bool:
        """True if it takes steps now."""
        return self.loop is not None

    @property
    def is_in_service(self) -> bool:
        """True if it takes new requests: it is driven, and neither drained nor about to leave."""
        return self.is_driven and not self.is_drained and not self.is_leaving
