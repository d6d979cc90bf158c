"""Configuration of each part of the scheduler, from the settings: core, admission, records, pins, port."""

from common.peer_limits import EdgeLimits
from quire.limit_settings import LimitSettings
from quire.scheduler_settings import SchedulerSettings
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.journal.store import RecordLimits
from scheduler_svc.requests.prefixes.prefix_requests import PinLimits
from scheduler_svc.requests.queue_limits import AdmissionLimits

_MOST_BATCHED_TOKENS = 65_536  # in a step, whatever bound the worker reports
_SESSION = "/quire.v1.Inference/Session"
# Streams of which a client process needs one, as it needs one session.
_WATCHES = (
    "/quire.v1.Cluster/Topology",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
_VITAL = frozenset({"/quire.v1.Cluster/Register", "/quire.v1.Cluster/DrainWorker", "/grpc.health.v1.Health/Check"})
_MIB = 1 << 20


def edge_limits(settings: LimitSettings) -> EdgeLimits:
    return EdgeLimits(
        max_connections=settings.max_connections,
        max_calls=settings.max_calls,
        max_calls_per_host=settings.max_calls_per_host,
        max_calls_per_connection=settings.max_calls_per_connection,
        max_calls_of=dict.fromkeys((_SESSION, *_WATCHES), settings.max_sessions_per_host),
        vital_methods=_VITAL,
        max_call_rate=settings.max_call_rate,
        max_cancel_rate=settings.max_cancel_rate,
        max_unread_bytes_per_connection=settings.max_unread_mb_per_connection * _MIB,
        max_unread_bytes=settings.max_unread_mb * _MIB,
        body_timeout_s=settings.body_timeout_s,
    )


def scheduler_config(settings: SchedulerSettings) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_batched_tokens=settings.max_batched_tokens or _MOST_BATCHED_TOKENS,
        max_num_seqs=settings.max_num_seqs,
        watermark=settings.watermark,
        pipeline_depth=1 if settings.step_form == "whole" else settings.pipeline_depth,
        enable_prefix_cache=settings.prefix_cache,
        order=settings.order,
        priority_patience_s=settings.priority_patience_s,
        preemption=settings.preemption,
        block_fetch=settings.block_fetch,
        preempt_every=settings.preempt_every,
    )


def admission_limits(settings: SchedulerSettings) -> AdmissionLimits:
    return AdmissionLimits(
        max_queue_requests=settings.max_queue_requests,
        max_queue_tokens=settings.max_queue_tokens,
        max_queue_wait_s=settings.max_queue_wait_ms / 1000,
        max_queue_share=settings.max_queue_share,
        max_paused_requests=settings.max_paused_requests,
        max_paused_tokens=settings.max_paused_tokens,
        max_paused_share=settings.max_paused_share,
        max_requests_per_session=settings.max_requests_per_session,
    )


def record_limits(settings: SchedulerSettings) -> RecordLimits:
    most = settings.max_record_mb << 20 or 1 << 50
    return RecordLimits(
        ttl_s=settings.record_ttl_s, max_bytes=most, max_tenant_bytes=int(most * settings.max_record_share)
    )


def parsers_given(settings: SchedulerSettings) -> dict[str, str]:
    """Parsers that the settings say, by field of GetModel's answer; empty for none."""
    given = {"tool_parser": settings.tool_parser, "reasoning_parser": settings.reasoning_parser}
    return {name: "" if parser == "none" else parser for name, parser in given.items() if parser != "auto"}


def pin_limits(settings: SchedulerSettings) -> PinLimits:
    return PinLimits(
        max_per_tenant=settings.max_pins_per_tenant,
        max_share=settings.max_pinned_share,
        max_share_per_tenant=settings.max_pinned_share_per_tenant,
    )
