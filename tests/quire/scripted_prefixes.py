"""The pins of the scripted server: a prefix has as many tokens as it has words, of which blocks of 16 are kept."""

from quire.errors import AlreadyExistsError, FieldViolation, InvalidRequestError, NotFoundError
from quire.v1 import inference_pb2 as pb

BLOCK_SIZE = 16


class ScriptedPrefixes:
    """Pinned prefixes, by tenant and name."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str], pb.PinPrefixRequest] = {}

    def pin(self, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
        if _num_blocks(request) == 0:
            raise InvalidRequestError.of([FieldViolation("prefix", f"must be at least {BLOCK_SIZE} tokens")])
        key = (request.tenant, request.name)
        known = self.requests.setdefault(key, request)
        if known != request:
            raise AlreadyExistsError(f"another prefix is pinned as {request.name!r}")
        return pb.PinPrefixResponse(prefix=_pinned(request), created=known is request)

    def unpin(self, request: pb.UnpinPrefixRequest) -> pb.UnpinPrefixResponse:
        if self.requests.pop((request.tenant, request.name), None) is None:
            raise NotFoundError(f"no prefix is pinned as {request.name!r}")
        return pb.UnpinPrefixResponse()

    def list(self, request: pb.ListPrefixesRequest) -> pb.ListPrefixesResponse:
        mine = sorted(key for key in self.requests if key[0] == request.tenant)
        return pb.ListPrefixesResponse(prefixes=[_pinned(self.requests[key]) for key in mine])


def _pinned(request: pb.PinPrefixRequest) -> pb.PinnedPrefix:
    num_blocks = _num_blocks(request)
    return pb.PinnedPrefix(
        name=request.name,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        num_tokens=num_blocks * BLOCK_SIZE,
        num_blocks=num_blocks,
        worker_ids=["w0"],
    )


def _num_blocks(request: pb.PinPrefixRequest) -> int:
    words = (request.text or " ".join(each.content for each in request.chat.messages)).split()
    return (len(words) or len(request.token_ids.ids)) // BLOCK_SIZE
