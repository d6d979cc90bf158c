"""The client SDK of Quire.

    >>> import quire
    >>> with quire.Client() as client:
    ...     print(client.generate("Once upon a time", max_tokens=32).text)

Knows only the wire: importing it brings grpcio and protobuf, neither torch nor redis.
"""

from quire.async_client import AsyncClient
from quire.client import Client, Stream
from quire.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    FieldViolation,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    QuireError,
    RequestCancelledError,
    RequestExpiredError,
    RequestFailedError,
    RetryableError,
    UnavailableError,
)
from quire.params import BeamParams, ChatMessage, ClientOptions, OnDisconnect, OutputParams, SamplingParams, StopParams
from quire.request_list import LiveState, RequestPage, RequestSummary
from quire.results import (
    Accepted,
    Chunk,
    Completion,
    Finish,
    FinishReason,
    Health,
    Model,
    PinnedPrefix,
    RequestMemory,
    RequestRecord,
    RequestState,
    Sample,
    SampleOutput,
    SamplingDefaults,
    StopCause,
    Timings,
    TokenLogprobs,
    Tokens,
    Usage,
)
from quire.stats import BlockStats, JournalStats, LatencyStats, SlotSplit, Stats, WorkerStats
from quire.stream import CompletionStream

__all__ = [
    "Accepted",
    "AlreadyExistsError",
    "AsyncClient",
    "BeamParams",
    "BlockStats",
    "ChatMessage",
    "Chunk",
    "Client",
    "ClientOptions",
    "Completion",
    "CompletionStream",
    "FailedPreconditionError",
    "FieldViolation",
    "Finish",
    "FinishReason",
    "Health",
    "InvalidRequestError",
    "JournalStats",
    "LatencyStats",
    "LiveState",
    "Model",
    "NotFoundError",
    "OnDisconnect",
    "OutputParams",
    "OverloadedError",
    "PinnedPrefix",
    "QuireError",
    "RequestCancelledError",
    "RequestExpiredError",
    "RequestFailedError",
    "RequestMemory",
    "RequestPage",
    "RequestRecord",
    "RequestState",
    "RequestSummary",
    "RetryableError",
    "Sample",
    "SampleOutput",
    "SamplingDefaults",
    "SamplingParams",
    "SlotSplit",
    "Stats",
    "StopCause",
    "StopParams",
    "Stream",
    "Timings",
    "TokenLogprobs",
    "Tokens",
    "UnavailableError",
    "Usage",
    "WorkerStats",
]

for _name in __all__:  # in tracebacks and help, by the name that a user imports
    globals()[_name].__module__ = __name__
