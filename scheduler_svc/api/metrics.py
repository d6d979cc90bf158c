"""Figures of a scheduler process for its own `/metrics`: those of the deployment while it leads, and of the process."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import Metric

from common.engine_metrics import engine_histograms, engine_numbers
from common.metric_families import gauges, process_families
from quire.merging import merged_stats
from quire.v1 import inference_pb2 as pb
from quire.wire_stats import stats_from_pb


class SchedulerMetrics:
    """One per process; `snapshots` has one of each shard that it leads, by number."""

    def __init__(self) -> None:
        self.snapshots: dict[int, Callable[[], pb.GetStatsResponse]] = {}

    def read(self) -> Iterator[Metric]:
        """Take snapshots; the families are made of them when they are used."""
        return _families([take() for take in self.snapshots.values()])


def _families(messages: Sequence[pb.GetStatsResponse]) -> Iterator[Metric]:
    yield gauges("quire_leading", "1 in a scheduler that leads, 0 in a standby.", [({}, bool(messages))])
    if messages:
        stats = merged_stats([stats_from_pb(message) for message in messages])
        yield from engine_numbers(stats)
        yield from engine_histograms(stats)
    yield from process_families({})
