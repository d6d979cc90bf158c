"""Keeper of pinned prefixes: compute them, pin them where they were computed, and again after a loss.

A prefix is computed once; any other worker pins it as soon as a request has computed it there. When no worker has it
any more, it is computed again without a client's call.
Requests come first: a pin takes no memory promised to a request, and no memory is reserved for a prefix that no worker
has; such a prefix is tried again until it fits. Pins of earlier schedulers wait for a worker of their model.
Knows nothing of clients and their messages.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial, reduce
from operator import xor

import structlog

from quire.errors import (
    OverloadedError,
    QuireError,
    RequestCancelledError,
    RequestFailedError,
    UnavailableError,
)
from quire.v1 import journal_pb2
from scheduler_svc.core.pins import PinRefusedError
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.requests.live.computations import Computation
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.prefixes.pin_journal import PinJournal
from scheduler_svc.requests.prefixes.prefix_pin import PrefixPin, restored_pin
from scheduler_svc.requests.recovery.journal_replay import JournaledPin

log = structlog.get_logger()

RETRY_S = 5.0  # until a prefix that was lost, and could not be pinned again, is tried once more
MAX_ATTEMPTS = 3  # to compute it, where it is evicted before it can be pinned


class PrefixKeeper:
    """Pins of all tenants. `admissions_still_fit`: True if each request that is being admitted still fits."""

    def __init__(self, engine: Engine, admissions_still_fit: Callable[[], bool], *, retry_s: float = RETRY_S) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self.pins = PinJournal(engine.journal)
        self._admissions_still_fit = admissions_still_fit
        self._retry_s = retry_s
        self._prefixes: dict[tuple[str, str], PrefixPin] = {}  # by tenant and name; the oldest first
        self._worker_ids: dict[str, None] = {}  # of present workers
        self._block_size = 0  # theirs
        self._fingerprint = ""  # of their model
        self._closed = False

    def __iter__(self) -> Iterator[PrefixPin]:
        return iter(self._prefixes.values())

    @property
    def has_worker(self) -> bool:
        return bool(self._worker_ids)

    @property
    def digest(self) -> int:
        """Digest of the pins that are kept, as `digest_of_pins` makes it."""
        return reduce(xor, (each.digest for each in self if each.is_kept), 0)

    def find(self, tenant: str, name: str) -> PrefixPin | None:
        return self._prefixes.get((tenant, name))

    def add(self, prefix: PrefixPin) -> None:
        """Add a new pin; `establish` brings it onto a worker."""
        self._prefixes[prefix.tenant, prefix.name] = prefix
        self._engine.on_result = self._pin_computed_prefixes

    def restore(self, journaled: Iterable[JournaledPin]) -> None:
        """Restore the pins of earlier schedulers, which the journal needs since they were read."""
        for each in journaled:
            self.add(restored_pin(each.change, each))

    def replace_pins(self, pins: Iterable[journal_pb2.PinChange], *, asked_before_s: float = math.inf) -> None:
        """Keep these pins, and no others but those that clients wait for, or have asked for since `asked_before_s`.

        A pin that is being computed for a client stays, and is kept when it has been.
        """
        wanted = {(each.tenant, each.name): each for each in pins}
        for prefix in list(self):
            may_go = prefix.is_kept and not prefix.waiters and prefix.asked_s < asked_before_s
            if may_go and wanted.get((prefix.tenant, prefix.name)) != prefix.to_change():
                self.drop(prefix, RequestCancelledError("the prefix was unpinned"))
        for key in wanted.keys() - self._prefixes.keys():
            self._copy(wanted[key])

    def _copy(self, change: journal_pb2.PinChange) -> None:
        """Keep a pin of another shard: as one of an earlier scheduler, but new in the journal."""
        prefix = restored_pin(change)
        self.pins.write(prefix)
        self.add(prefix)
        log.info("prefix copied from another shard", name=prefix.name, tenant=prefix.tenant)
        if self._worker_ids and prefix.fingerprint == self._fingerprint:
            self.measure(prefix)
            self.establish(prefix)

    def measure(self, prefix: PrefixPin) -> None:
        """Cut a prefix into blocks of the present workers' size."""
        prefix.cut_into_blocks(self._block_size)

    def num_blocks(self) -> int:
        """Blocks of the smallest worker, pinned or not."""
        return self._scheduler.workers.max_tokens_that_fit(with_pins=False) // self._block_size

    def num_blocks_too_many(self, prefix: PrefixPin, *, with_pins: bool = False) -> int:
        """Number of blocks by which a prefix is too long for the workers, alone or beside the present pins.

        A request that begins with it must fit, too: pinned blocks are not counted as the request's own.
        """
        num_blocks = self._scheduler.workers.max_tokens_that_fit() // self._block_size
        if not with_pins:
            num_blocks += self._scheduler.workers.num_pinned_blocks()
        return max(0, prefix.num_blocks - max(0, num_blocks - 1) // 2)

    def establish(self, prefix: PrefixPin) -> None:
        """Pin a prefix on each worker that has its blocks; compute it if none has. There must be a worker."""
        self._stop_trying(prefix)
        prefix.has_failed = False
        if self._closed:
            prefix.resolve_waiters(_shutting_down())
            return
        if self.num_blocks_too_many(prefix, with_pins=True):
            reason = "with the present pins, a request that begins with the prefix would not fit: unpin something"
            self._fail(prefix, OverloadedError(reason))
            return
        refusal: PinRefusedError | None = None
        for worker_id in self._worker_ids:
            try:
                self._try_to_pin(prefix, worker_id)
            except PinRefusedError as error:
                refusal = error
        if prefix.worker_ids:
            return
        if refusal is None:
            prefix.num_attempts = 0
            self._compute(prefix)
        else:
            self._fail(prefix, OverloadedError(str(refusal)))

    def drop(self, prefix: PrefixPin, error: QuireError | None) -> None:
        """Drop a pin, and resolve its waiters with the error. Harmless if it was dropped before."""
        if self.find(prefix.tenant, prefix.name) is not prefix:
            return
        del self._prefixes[prefix.tenant, prefix.name]
        if not self._prefixes:
            self._engine.on_result = None
        self._stop_trying(prefix)
        for worker_id in prefix.worker_ids:
            self._scheduler.workers.unpin_blocks(worker_id, prefix.key)
        prefix.worker_ids.clear()
        prefix.resolve_waiters(error)
        if prefix.is_kept:
            self.pins.remove_pin(prefix)
            log.info("prefix unpinned", name=prefix.name, tenant=prefix.tenant)
        self._engine.wake_workers()

    def close(self) -> None:
        """Stop computing prefixes. Present pins stay, for the requests that still run."""
        self._closed = True
        for prefix in self:
            self._stop_trying(prefix)
            prefix.resolve_waiters(_shutting_down())

    def add_worker(self, worker_id: str, *, block_size: int, fingerprint: str) -> None:
        """Add a worker, which has nothing cached, before its first step is scheduled. `fingerprint`: its model's."""
        self._worker_ids[worker_id] = None
        self._block_size, self._fingerprint = block_size, fingerprint
        for prefix in list(self):
            if prefix.fingerprint != fingerprint:
                if prefix.block_size:  # its model was served by this process, and is replaced
                    self.drop(prefix, UnavailableError("another model is served now", 1.0))
                continue
            if prefix.block_size != block_size:  # all workers are new
                self._stop_trying(prefix)
                self.measure(prefix)
            if not prefix.worker_ids and prefix.group is None and not prefix.has_failed:
                self.establish(prefix)

    def remove_worker(self, worker_id: str) -> None:
        """Remove a worker after the scheduler has removed it."""
        del self._worker_ids[worker_id]
        for prefix in self:
            prefix.worker_ids.discard(worker_id)
        self._try_pins_again()
        for prefix in list(self):
            is_nowhere = prefix.block_size and not prefix.worker_ids and prefix.group is None
            if is_nowhere and not prefix.has_failed and self._worker_ids:
                self.establish(prefix)

    def _try_pins_again(self) -> None:
        """Try every pin again: a request that only the lost worker could hold may need its memory."""
        pinned = [(prefix, worker_id) for prefix in self for worker_id in sorted(prefix.worker_ids)]
        for prefix, worker_id in pinned:
            self._scheduler.workers.unpin_blocks(worker_id, prefix.key)
            prefix.worker_ids.discard(worker_id)
        for prefix, worker_id in pinned:
            with suppress(PinRefusedError):
                self._try_to_pin(prefix, worker_id)

    def _compute(self, prefix: PrefixPin) -> None:
        prefix.num_attempts += 1
        prefix.group = prefix.new_group(self._engine.number_sequences(1))
        computation = Computation(partial(self._on_computed, prefix), partial(self._on_failed, prefix))
        self._engine.computations.start(prefix.group, computation)

    def _on_computed(self, prefix: PrefixPin, worker_id: str) -> None:
        prefix.group = None
        try:
            is_pinned = self._try_to_pin(prefix, worker_id)
        except PinRefusedError as refusal:
            self._fail(prefix, OverloadedError(str(refusal)))
            return
        if not is_pinned and prefix.num_attempts < MAX_ATTEMPTS:
            self._compute(prefix)
        elif not is_pinned:
            reason = "memory is so short that the prefix was evicted as soon as it was computed: try again later"
            self._fail(prefix, OverloadedError(reason))

    def _on_failed(self, prefix: PrefixPin, reason: str) -> None:
        prefix.group = None
        prefix.has_failed = True
        self._fail(prefix, RequestFailedError(reason))

    def _fail(self, prefix: PrefixPin, error: OverloadedError | RequestFailedError) -> None:
        """Handle a prefix that no worker has and none computes. If memory was short, a kept pin is tried again later.

        A prefix that cannot be computed waits for its next use, lest it crash worker after worker.
        """
        if not prefix.is_kept:
            self.drop(prefix, error)
            return
        if not prefix.is_missed:
            prefix.is_missed = True
            log.warning("prefix lost", name=prefix.name, tenant=prefix.tenant, reason=error.message)
        prefix.resolve_waiters(error)
        if isinstance(error, OverloadedError):
            prefix.retry = asyncio.get_running_loop().call_later(self._retry_s, self._try_again, prefix)

    def _try_again(self, prefix: PrefixPin) -> None:
        prefix.retry = None
        if self._worker_ids:
            self.establish(prefix)

    def _try_to_pin(self, prefix: PrefixPin, worker_id: str) -> bool:
        """Pin a prefix on a worker that does not have it. False: not all of its blocks are there.

        Raises PinRefusedError if the memory is promised to requests, in the queue or on their way to it.
        """
        if not self._scheduler.workers.pin_blocks(worker_id, prefix.key, prefix.block_hashes):
            return False
        if not self._admissions_still_fit():
            self._scheduler.workers.unpin_blocks(worker_id, prefix.key)
            raise PinRefusedError(
                f"the pin would leave worker {worker_id} too few blocks for a request that is being admitted: "
                "come back when it has finished"
            )
        self._stop_trying(prefix)
        prefix.worker_ids.add(worker_id)
        if not prefix.is_kept:
            prefix.is_kept = True
            self.pins.write(prefix)
        prefix.is_missed = prefix.has_failed = False
        log.info(
            "prefix pinned",
            name=prefix.name,
            tenant=prefix.tenant,
            worker_id=worker_id,
            num_tokens=prefix.num_tokens,
            num_blocks=prefix.num_blocks,
        )
        prefix.resolve_waiters(None)
        return True

    def _pin_computed_prefixes(self, plan: StepPlan) -> None:
        """Pin prefixes that a prompt has just computed on a worker that lacked them. Called after every result.

        Looks at sequences that have just sampled for the first time since they were started on the worker.
        """
        missing = [prefix for prefix in self if plan.worker_id not in prefix.worker_ids]
        if not missing or self._closed:
            return
        sampled = [*plan.sampled_sequences, *(plan.sequences[row] for row in plan.candidate_rows)]
        fresh = [each for each in sampled if len(each.token_ids) - each.num_tokens_at_start <= 1]
        for prefix in missing:
            if any(prefix.is_prefix_of(sequence) for sequence in fresh):
                with suppress(PinRefusedError):
                    self._try_to_pin(prefix, plan.worker_id)

    def _stop_trying(self, prefix: PrefixPin) -> None:
        """Cancel the computation of a prefix and its next trial."""
        if prefix.group is not None:
            group, prefix.group = prefix.group, None
            self._engine.computations.cancel(group)
        if prefix.retry is not None:
            prefix.retry.cancel()
            prefix.retry = None


def _shutting_down() -> UnavailableError:
    return UnavailableError("the scheduler is shutting down", 1.0)
