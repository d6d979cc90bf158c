"""The door for pins: what clients ask to be kept is checked and tokenised here, and waited for.

Which worker has which prefix is the keeper's. What a client is told of a pin is in the journal before that.
"""

import asyncio

from quire.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    FieldViolation,
    InvalidRequestError,
    NotFoundError,
    QuireError,
    RequestCancelledError,
    UnavailableError,
)
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.pinned_prefix import PinnedPrefix
from scheduler_svc.requests.prefix_keeper import PrefixKeeper
from scheduler_svc.requests.prompt_checks import SERVE_WITH_MORE_MEMORY
from scheduler_svc.requests.prompt_tokenizer import prefix_of
from scheduler_svc.requests.request_checks import check_prefix
from scheduler_svc.requests.served_model import ServedModel


class NameInUseError(AlreadyExistsError):
    """Another prefix is pinned by this name."""

    reason = "PREFIX_NAME_IN_USE"


class Prefixes:
    """`is_enabled`: whether there is a prefix cache, of which pins are blocks."""

    def __init__(self, admission: Admission, keeper: PrefixKeeper, *, is_enabled: bool) -> None:
        self._admission = admission
        self._keeper = keeper
        self._is_enabled = is_enabled

    async def pin(self, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
        """Returns once a worker has the prefix. A new one is forgotten if all who wait for it give up.

        Raises InvalidRequestError, FailedPreconditionError, NameInUseError, OverloadedError if its memory is promised
        to requests, UnavailableError, RequestCancelledError if it is unpinned meanwhile, RequestFailedError.
        """
        model = self._admission.require_model()
        check_prefix(request, model.limits)
        if not self._is_enabled:
            raise FailedPreconditionError("pins are kept in the prefix cache: serve with prefix_cache on")
        token_ids = await self._admission.tokenizer.token_ids(prefix_of(request), model)
        self._check_open(model)
        prefix, is_new = self._known_or_new(request, token_ids, model)
        if not prefix.worker_ids:
            await self._until_pinned(prefix)
        await self._keeper.pins.until(prefix.durable)
        return pb.PinPrefixResponse(prefix=prefix.to_pb(), created=is_new)

    async def unpin(self, request: pb.UnpinPrefixRequest) -> None:
        """Lets it go on all workers, also while it is being computed. Raises NotFoundError, UnavailableError."""
        prefix = self._keeper.find(request.tenant, request.name)
        if prefix is not None:
            self._keeper.drop(prefix, RequestCancelledError("the prefix was unpinned before it was computed"))
        is_gone = await self._keeper.pins.until_gone(request.tenant, request.name)
        if prefix is None and not is_gone:
            raise NotFoundError("the tenant has no pin of this name; ListPrefixes shows those that it has")

    def of_tenant(self, tenant: str) -> pb.ListPrefixesResponse:
        """By name; those, too, that no worker has at the moment."""
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
    ) -> tuple[PinnedPrefix, bool]:
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
        prefix = PinnedPrefix(
            name=request.name,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            token_ids=token_ids,
            fingerprint=model.fingerprint,
        )
        self._keeper.measure(prefix)
        if not prefix.num_blocks:
            needed = f"only full blocks are kept: give at least {prefix.block_size}"
            raise _refusal(f"has {len(token_ids)} tokens, and {needed}")
        if prefix.num_tokens >= model.limits.max_model_len:
            longest = f"the model's context holds {model.limits.max_model_len:,}, the output included"
            raise _refusal(f"has {len(token_ids):,} tokens; {longest}: shorten it")
        num_too_many = self._keeper.num_blocks_too_many(prefix)
        if num_too_many:
            most = (prefix.num_blocks - num_too_many) * prefix.block_size
            raise _refusal(
                f"has {len(token_ids):,} tokens, and a request that begins with it would not fit beside it: "
                f"shorten it to at most {most:,}, or {SERVE_WITH_MORE_MEMORY}"
            )
        self._keeper.add(prefix)
        return prefix, True

    async def _until_pinned(self, prefix: PinnedPrefix) -> None:
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


def _refusal(description: str) -> InvalidRequestError:
    return InvalidRequestError.of([FieldViolation("prefix", description)])
