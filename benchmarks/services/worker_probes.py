"""Probes of an iteration's stages in a worker's process, between the wire and the execution.

The only file that reaches into a worker for that; a worker that is not measured never loads it.
"""

from benchmarks.services.stage_spans import SpanLog
from worker_svc.service import scheduler_stream, servicer
from worker_svc.steps.seat_table import SeatTable


def probe_worker(log: SpanLog) -> None:
    """Once, before the process serves."""
    log.wrap(servicer, "open_request", "open", lambda _, message: int(message.step_id))
    log.wrap(scheduler_stream, "step_from_pb", "decode", lambda arguments, _: int(arguments[0].step_id))
    log.wrap(SeatTable, "check", "check", lambda arguments, _: int(arguments[1].step_id))
    log.wrap(SeatTable, "take_over", "take over")
    log.wrap(scheduler_stream, "result_to_pb", "encode")
    log.wrap(servicer, "seal_response", "seal", lambda arguments, _: int(arguments[0].step_id))
