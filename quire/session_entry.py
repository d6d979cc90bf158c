"""State of an open request in its session, beside its output. Written by the session only."""

import asyncio
from dataclasses import dataclass, field

from quire.errors import UnavailableError
from quire.open_request import OpenRequest
from quire.silence import Silence
from quire.v1 import inference_pb2 as pb


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """The session's state of an open request."""

    request: OpenRequest
    submission: pb.GenerateRequest | None  # None: submitted elsewhere, or accepted: its prompt may be long
    deadline_s: float | None  # on the loop's clock
    holds_when_behind: bool  # stays attached while its reader is slow, since the server cancels what has no reader
    is_own: bool = field(init=False)  # submitted here, not attached to
    handle: int | None = None  # on the current stream
    was_sent: bool = False
    is_cancelled: bool = False
    num_refusals: int = 0
    is_new: bool = False  # its id was made for it, so that no shard can have it
    shards_version: int = 0  # of the numbers of shards by which its shard was chosen; 0: it is in no other shard
    moved_since_s: float | None = None  # shards have refused it since then, because their number had changed
    expires_s: float = 0.0  # when it fails, if it has a deadline; later for a reader that has fetched what it missed
    num_misfits: int = 0  # chunks in a row that did not fit what is here
    retries_later: bool = False  # refused for now; one of the timers brings it back
    unreachable_since_s: float | None = None
    unreachable: UnavailableError | None = None  # why its stream broke last
    silence: Silence = field(default_factory=Silence)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_own = self.submission is not None
