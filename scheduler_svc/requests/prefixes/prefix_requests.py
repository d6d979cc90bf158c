"""Calls of clients on pins: check and tokenise a prefix, wait until a worker has it, unpin it, list pins.

`PrefixKeeper` decides which worker has which prefix. A client's answer waits for the journal.
"""

import asyncio
from dataclasses import dataclass

from common.violations import refusal_of
from quire.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    NotFoundError,
    OverloadedError,
    QuireError,
    RequestCancelledError,
    UnavailableError,
)
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.params.prompt_checks import SERVE_WITH_MORE_MEMORY
from scheduler_svc.requests.params.prompt_tokenizer import prefix_of
from scheduler_svc.requests.params.request_checks import check_prefix
from scheduler_svc.requests.params.served_model import ServedModel
from scheduler_svc.requests.prefixes.prefix_keeper import PrefixKeeper
from scheduler_svc.requests.prefixes.prefix_pin import PrefixPin

_RETRY_S = 5.0  # when a client unpins is not known


class NameInUseError(AlreadyExistsError):
    """Another prefix is pinned by this name."""

    reason = "PREFIX_NAME_IN_USE"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinLimits:
    """Limits of pins: their number, and their share of a worker's blocks."""

    max_per_tenant: int = 64
    max_share: float = 1.0  # of all tenants together
    max_share_per_tenant: float = 1.0


_NO_LIMITS = PinLimits()


class Prefixes:
    """One per scheduler. `is_enabled`: True with a prefix cache, in which pins are kept."""

    def __init__(
        self, admission: Admission, keeper: PrefixKeeper, limits: PinLimits = _NO_LIMITS, *, is_enabled: bool
    ) -> None:
        self._limits = limits
        self._admission = admission
        self._keeper = keeper
        self._is_enabled = is_enabled

    async def pin(self, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
        """Pin a prefix; returns once a worker has it. A new pin is dropped if all its waiters give up.

        Raises InvalidRequestError, FailedPreconditionError, NameInUseError, OverloadedError if its memory is promised
        to requests, UnavailableError, RequestCancelledError if it is unpinned meanwhile, RequestFailedError.
        """
        model = self._admission.require_model()
        check_prefix(request, model.limits)
        if not self._is_enabled:
            raise FailedPreconditionError("pins are kept in the prefix cache: serve with prefix_cache on")
        token_ids = await self._admission.tokenizer.token_ids(prefix_of(request), model, request.tenant)
        self._check_open(model)
        prefix, is_new = self._known_or_new(request, token_ids, model)
        prefix.asked_s = asyncio.get_running_loop().time()
        if not prefix.worker_ids:
            await self._until_pinned(prefix)
        await self._keeper.pins.until(prefix.durable)
        return pb.PinPrefixResponse(prefix=prefix.to_pb(), created=is_new)

    async def unpin(self, request: pb.UnpinPrefixRequest) -> None:
        """Unpin a prefix on all workers, also while it is being computed. Raises NotFoundError, UnavailableError."""
        prefix = self._keeper.find(request.tenant, request.name)
        if prefix is not None:
            self._keeper.drop(prefix, RequestCancelledError("the prefix was unpinned before it was computed"))
        is_gone = await self._keeper.pins.until_gone(request.tenant, request.name)
        if prefix is None and not is_gone:
            of_whom = f" for tenant {request.tenant!r}" if request.tenant else ""
            raise NotFoundError(f"no prefix is pinned as {request.name!r}{of_whom}")

    def of_tenant(self, tenant: str) -> pb.ListPrefixesResponse:
        """Pins of a tenant, by name, those included that no worker has at the moment."""
        mine = sorted((each for each in self._keeper if each.tenant == tenant), key=lambda each: each.name)
        return pb.ListPrefixesResponse(prefixes=[each.to_pb() for each in mine])

    def _check_open(self, model: ServedModel) -> None:
        if self._admission.closed:
            raise UnavailableError("the scheduler is shutting down", 1.0)
        if self._admission.require_model().fingerprint != model.fingerprint:
            raise UnavailableError("another model is served now; ask again", 1.0)
        if not self._keeper.has_worker:
            raise UnavailableError("no worker is connected at the moment", 1.0)

    def _known_or_new(
        self, request: pb.PinPrefixRequest, token_ids: list[int], model: ServedModel
    ) -> tuple[PrefixPin, bool]:
        known = self._keeper.find(request.tenant, request.name)
        if known is not None and known.fingerprint != model.fingerprint:  # of an earlier scheduler, and another model
            self._keeper.drop(known, None)
            known = None
        if known is not None:
            if (known.token_ids, known.cache_salt) != (token_ids, request.cache_salt):
                raise NameInUseError(
                    f"another prefix, or one with another cache_salt, is pinned as {request.name!r}; "
                    "choose a new name, or unpin that one"
                )
            return known, False
        prefix = PrefixPin(
            name=request.name,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            token_ids=token_ids,
            fingerprint=model.fingerprint,
        )
        self._keeper.measure(prefix)
        if not prefix.num_blocks:
            needed = f"only full blocks are kept: give at least {prefix.block_size}"
            raise refusal_of("prefix", f"has {len(token_ids)} tokens, and {needed}")
        if prefix.num_tokens >= model.limits.max_model_len:
            longest = f"the model's context holds {model.limits.max_model_len:,}, the output included"
            raise refusal_of("prefix", f"has {len(token_ids):,} tokens; {longest}: shorten it")
        num_too_many = self._keeper.num_blocks_too_many(prefix)
        if num_too_many:
            most = (prefix.num_blocks - num_too_many) * prefix.block_size
            raise refusal_of(
                "prefix",
                f"has {len(token_ids):,} tokens, and a request that begins with it would not fit beside it: "
                f"shorten it to at most {most:,}, or {SERVE_WITH_MORE_MEMORY}",
            )
        self._check_limits(prefix)
        self._keeper.add(prefix)
        return prefix, True

    def _check_limits(self, prefix: PrefixPin) -> None:
        """Raise OverloadedError above a limit, InvalidRequestError if it alone is. Shared blocks count for each pin."""
        limits = self._limits
        mine = [each for each in self._keeper if each.tenant == prefix.tenant]
        if len(mine) >= limits.max_per_tenant:
            raise OverloadedError(f"the tenant has {len(mine)} pins, which is the limit: unpin one", _RETRY_S)
        num_blocks = self._keeper.num_blocks()
        for held, share, whose in (
            (mine, limits.max_share_per_tenant, "the tenant's"),
            (list(self._keeper), limits.max_share, "the"),
        ):
            most = int(num_blocks * share)
            if prefix.num_blocks > most:
                raise refusal_of(
                    "prefix",
                    f"has {prefix.num_tokens:,} tokens in full blocks; pins may hold {share:.0%} of the memory: "
                    f"shorten it to at most {most * prefix.block_size:,}, or serve with more KV memory",
                )
            num_held = sum(each.num_blocks for each in held)
            if num_held + prefix.num_blocks > most:
                raise OverloadedError(
                    f"{whose} pins hold {num_held:,} blocks, this one needs {prefix.num_blocks:,}, and they may have "
                    f"{most:,} together: unpin some, or come back later",
                    _RETRY_S,
                )

    async def _until_pinned(self, prefix: PrefixPin) -> None:
        waiter: asyncio.Future[QuireError | None] = asyncio.get_running_loop().create_future()
        prefix.waiters.add(waiter)
        try:
            if prefix.group is None:
                self._keeper.establish(prefix)
            error = await waiter
            if error is not None:
                raise error
        finally:
            prefix.waiters.discard(waiter)
            if not prefix.waiters and not prefix.is_kept:
                self._keeper.drop(prefix, None)
