"""Metric families of Prometheus from plain numbers, and their text. Knows no figure of ours."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Labels = Mapping[str, str]
Labelled = Iterable[tuple[Labels, float]]  # samples of a family: labels and value; all with the same label names


class Buckets(Protocol):
    """A histogram: `counts` by bucket, not summed up, one more than there are upper bounds."""

    @property
    def bounds(self) -> Sequence[float]: ...
    @property
    def counts(self) -> Sequence[int]: ...
    @property
    def sum(self) -> float: ...


_PROCESS = ProcessCollector(registry=None)


def gauges(name: str, about: str, samples: Labelled) -> Metric:
    """A family of numbers that rise and fall."""
    return _filled(GaugeMetricFamily(name, about), name, samples)


def counters(name: str, about: str, samples: Labelled) -> Metric:
    """A family of numbers that only rise; `_total` is added to the name of its samples."""
    return _filled(CounterMetricFamily(name, about), f"{name}_total", samples)


def histogram(name: str, about: str, labels: Labels, values: Buckets) -> Metric:
    """A family with one histogram."""
    counts = list(accumulate(values.counts or (0,)))
    bounds = [*map(floatToGoString, values.bounds), "+Inf"]
    family = HistogramMetricFamily(name, about, labels=list(labels))
    family.add_metric(list(labels.values()), list(zip(bounds, counts, strict=True)), values.sum)
    return family


def process_families(labels: Labels) -> Iterable[Metric]:
    """CPU time, memory and files of this process, as Prometheus's clients name them; none without /proc."""
    for family in _PROCESS.collect():
        family.samples = [each._replace(labels={**each.labels, **labels}) for each in family.samples]
        yield family


def text_of(families: Iterable[Metric]) -> bytes:
    """The families in Prometheus's text format, whose content type is `CONTENT_TYPE`."""
    return generate_latest(_Given(families))


class _Given(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _filled(family: Metric, name: str, samples: Labelled) -> Metric:
    family.samples = [Sample(name, dict(labels), value) for labels, value in samples]
    return family
