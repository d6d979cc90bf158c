"""The limits of the scheduler's port, from its settings."""

from common.peer_limits import EdgeLimits
from quire.limit_settings import LimitSettings

_SESSION = "/quire.v1.Inference/Session"
_MIB = 1 << 20


def edge_limits(settings: LimitSettings) -> EdgeLimits:
    return EdgeLimits(
        max_connections=settings.max_connections,
        max_calls=settings.max_calls,
        max_calls_per_host=settings.max_calls_per_host,
        max_calls_per_connection=settings.max_calls_per_connection,
        max_calls_of={_SESSION: settings.max_sessions_per_host},
        max_call_rate=settings.max_call_rate,
        max_cancel_rate=settings.max_cancel_rate,
        max_unread_bytes_per_connection=settings.max_unread_mb_per_connection * _MIB,
        max_unread_bytes=settings.max_unread_mb * _MIB,
        body_timeout_s=settings.body_timeout_s,
    )
