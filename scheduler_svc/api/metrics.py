"""Figures of a scheduler process for its own `/metrics`: those of the deployment while it leads, and of the process."""

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from common.engine_metrics import engine_histograms, engine_numbers
from common.metric_families import gauges, process_families
from quire.v1 import inference_pb2 as pb
from quire.wire_stats import stats_from_pb


class SchedulerMetrics:
    """One per process; `snapshot` is set when it begins to lead."""

    def __init__(self) -> None:
        self.snapshot: Callable[[], pb.GetStatsResponse] | None = None

    def read(self) -> Iterator[Metric]:
        """Take a snapshot; the families are made of it when they are used."""
        message = self.snapshot() if self.snapshot is not None else None
        return _families(message)


def _families(message: pb.GetStatsResponse | None) -> Iterator[Metric]:
    is_leading = message is not None
    yield gauges("quire_leading", "1 in the scheduler that leads, 0 in a standby.", [({}, is_leading)])
    if message is not None:
        stats = stats_from_pb(message)
        yield from engine_numbers(stats)
        yield from engine_histograms(stats)
    yield from process_families({})
