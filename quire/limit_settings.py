"""Settings of the scheduler that limit peers and tenants: connections, calls, queue, memory."""

from pydantic import Field

from quire.settings import Settings

_MOST = (1 << 31) - 1  # of what gRPC itself enforces


class LimitSettings(Settings):
    """Limits by connection (an address with its port), by host (the address without) and by tenant.

    Calls beyond a limit are answered with RESOURCE_EXHAUSTED, the name of the limit and a retry delay. Where 0 is
    allowed it means no limit. Behind a proxy all clients are one host.
    """

    max_connections: int = Field(
        4096, ge=0, le=_MOST, description="connections open at once; more are closed as they come"
    )
    max_calls: int = Field(
        10_000,
        ge=0,
        description="calls open at once, including sessions and streams; as many again to health and reflection, which "
        "need no key",
    )
    max_calls_per_host: int = Field(
        5_000, ge=0, description="calls that one host may have open at once; as many again to health and reflection"
    )
    max_calls_per_connection: int = Field(
        2_048,
        ge=0,
        le=_MOST,
        description="calls that one connection may have open at once; gRPC clients queue further ones",
    )
    max_sessions_per_host: int = Field(
        1_000,
        ge=0,
        description="sessions that one host may have open at once, and as many streams each of Topology, Health/Watch "
        "and reflection; a client process needs one",
    )
    max_call_rate: float = Field(
        1_000.0,
        ge=0,
        description="calls per second that one connection may begin, in bursts of up to two seconds' worth; one that "
        "goes on at twice the rate although it is refused is cut",
    )
    max_cancel_rate: float = Field(
        100.0,
        ge=0,
        description="calls per second that one connection may cancel, in bursts of up to ten seconds' worth; one that "
        "cancels more is cut",
    )
    max_unread_mb_per_connection: int = Field(
        64, ge=0, description="MiB of incomplete messages that one connection may have sent; beyond that it is cut"
    )
    max_unread_mb: int = Field(
        256, ge=0, description="the same for all connections together; beyond that those that hold the most are cut"
    )
    max_requests_per_session: int = Field(
        10_000,
        ge=1,
        description="requests that one session may have open at once; further ones are refused with a retry delay",
    )
    max_queue_share: float = Field(
        0.9, gt=0, le=1, description="part of the queue, in requests and in tokens, that one tenant may fill"
    )
    max_paused_requests: int = Field(1000, ge=1, description="requests that may be paused at once")
    max_paused_tokens: int = Field(
        4_000_000, ge=1, description="tokens, of prompts and outputs, that all paused requests may have together"
    )
    max_paused_share: float = Field(0.5, gt=0, le=1, description="part of both paused limits that one tenant may use")
    max_pins_per_tenant: int = Field(64, ge=1, description="prefixes that one tenant may pin")
    max_pinned_share: float = Field(
        0.75, gt=0, le=1, description="part of a worker's blocks that all pins may hold together"
    )
    max_pinned_share_per_tenant: float = Field(0.5, gt=0, le=1, description="the same for the pins of one tenant")
    max_record_mb: int = Field(
        1024,
        ge=0,
        description="MiB of the store for the records of ended requests, in each shard; beyond that the records that "
        "ended first are dropped, from the tenant that has the most",
    )
    max_record_share: float = Field(
        0.75,
        gt=0,
        le=1,
        description="part of it for the records of one tenant; beyond that those of its records that ended first are "
        "dropped",
    )
    body_timeout_s: float = Field(
        30.0, ge=0, description="how long the request message of a call may take to arrive completely"
    )
